from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specwire import probe, rpc
from specwire.errors import Reason, SpecwireError, from_rpc_error
from specwire.rpc import LINK_MESSAGE_BYTES, PUBLIC_MESSAGE_BYTES, channel_options, server_options
from specwire.serve import GrpcHost
from tests.contract.support import SERVICE, call, hosted, running

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def echo(request: bytes, context: Any) -> bytes:
    return request


async def test_health_is_not_serving_until_told() -> None:
    async with running() as host, grpc.aio.insecure_channel(host.addresses[0]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def states() -> list[int]:
            asked = [health_pb2.HealthCheckRequest(service=name) for name in ("", SERVICE)]
            return [(await stub.Check(request)).status for request in asked]

        assert await states() == [NOT_SERVING, NOT_SERVING]
        host.set_serving(True)
        await asyncio.sleep(0)
        assert await states() == [SERVING, SERVING]
        await host.set_serving(False)
        assert await states() == [NOT_SERVING, NOT_SERVING]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_probe_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"unix:{tmp_path}/s"

    async def status(*flags: str) -> int:
        return await asyncio.to_thread(probe.main, [address, "--timeout-s", "20", *flags])

    async with running(address) as host:
        assert await status() == 1
        await host.set_serving(True)
        assert await status("--service", SERVICE) == 0
        assert await status("--service", "other") == 1
    assert await status() == 1
    lines = capsys.readouterr().out.splitlines()
    ends = ["NOT_SERVING", "SERVING", "SERVICE_UNKNOWN", "UNREACHABLE"]
    assert [line.rsplit(" ", 1)[1] for line in lines] == ends


@pytest.mark.parametrize("wanted", [True, False])
async def test_reflection_only_when_asked(wanted: bool) -> None:
    async with (
        running(reflection=wanted) as host,
        grpc.aio.insecure_channel(host.addresses[0]) as channel,
    ):
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        if wanted:
            reply = await asked.read()
            assert SERVICE in [s.name for s in reply.list_services_response.service]
            assert await asked.read() is grpc.aio.EOF
        else:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asked.read()
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_a_used_address_is_a_typed_error(kind: str, tmp_path: Path) -> None:
    address = "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/s"
    async with running(address) as first:
        second = GrpcHost(address=first.addresses[0], services=[], link=True)
        with pytest.raises(SpecwireError) as caught:
            await second.start()
        assert caught.value.reason is Reason.PORT_IN_USE
        assert first.addresses[0] in caught.value.message


async def test_an_impossible_address_is_a_typed_error() -> None:
    for address in ("203.0.113.7:1", "nonsense", "127.0.0.1:99999", "unix:/nonexistent/s"):
        host = GrpcHost(address=address, services=[], link=True)
        with pytest.raises(SpecwireError) as caught:
            await host.start()
        assert caught.value.reason is Reason.SETTINGS_INVALID
        assert address in caught.value.message


async def test_unix_sockets_are_private_and_stale_ones_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    async with running([f"unix:{path}", "127.0.0.1:0"]) as host:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert len(host.addresses) == 2 and not host.addresses[1].endswith(":0")


async def test_message_limits() -> None:
    async with hosted({"unary_unary": echo, "unary_stream": stream_size}, link=True) as channel:
        tensor = os.urandom(4_915_244)
        assert await call(channel, "unary_unary", tensor) == [tensor]
        largest = b"\1" * LINK_MESSAGE_BYTES
        assert len((await call(channel, "unary_unary", largest))[0]) == LINK_MESSAGE_BYTES
        await refused(channel, "unary_unary", largest + b"\1")
        # The reply's size is checked just the same.
        await refused(channel, "unary_stream", str(LINK_MESSAGE_BYTES + 1).encode())
    async with hosted({"unary_unary": echo}, link=False) as channel:
        largest = b"\1" * PUBLIC_MESSAGE_BYTES
        assert len((await call(channel, "unary_unary", largest))[0]) == PUBLIC_MESSAGE_BYTES
        await refused(channel, "unary_unary", largest + b"\1")


async def stream_size(request: bytes, context: Any) -> Any:
    yield b"\0" * int(request)


async def refused(channel: grpc.aio.Channel, kind: str, payload: bytes) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        await call(channel, kind, payload)
    assert from_rpc_error(caught.value).reason is Reason.MESSAGE_TOO_LARGE


async def silent_call(server: list[tuple[str, int]], client: list[tuple[str, int]]) -> None:
    async def silent(request: bytes, context: Any) -> bytes:
        await asyncio.sleep(6.5)
        return b"done"

    handler = grpc.unary_unary_rpc_method_handler(silent)
    host = grpc.aio.server(options=server)
    host.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("s.S", {"M": handler})])
    port = host.add_insecure_port("127.0.0.1:0")
    await host.start()
    client = [*client, ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=client) as channel:
        try:
            assert await channel.unary_unary("/s.S/M")(b"") == b"done"
        finally:
            await host.stop(0)


def scaled(options: list[tuple[str, int]], factor: int) -> list[tuple[str, int]]:
    names = ("grpc.keepalive_time_ms", "grpc.http2.min_ping_interval_without_data_ms")
    return [(name, value // factor if name in names else value) for name, value in options]


async def test_keepalive_options_are_paired() -> None:
    """A silent call survives the pings (ten times faster here); gRPC's own server would end it."""
    for link in (True, False):
        pings = dict(channel_options(link))["grpc.keepalive_time_ms"]
        minimum = dict(server_options(link))["grpc.http2.min_ping_interval_without_data_ms"]
        assert pings >= 2 * minimum
    client = scaled(channel_options(True), 10)
    ours, default = await asyncio.gather(
        silent_call(scaled(server_options(True), 10), client),
        silent_call([], client),
        return_exceptions=True,
    )
    assert ours is None
    # Without this half the test would also pass if nobody pinged.
    assert isinstance(default, grpc.aio.AioRpcError) and default.details() == "Too many pings"


FROZEN = """
import asyncio, os, signal, sys
import grpc
from specwire.rpc import server_options

async def echo(requests, context):
    async for request in requests:
        yield request
        os.kill(os.getpid(), signal.SIGSTOP)

async def main():
    server = grpc.aio.server(options=server_options(link=True))
    handler = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s.S", {"M": handler}),))
    server.add_insecure_port(sys.argv[1])
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


async def test_a_server_that_is_frozen_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel goes on taking what comes. gRPC waits a minute for a ping where it is not told."""
    monkeypatch.setattr(rpc, "_PING_MS", {True: 500})
    monkeypatch.setattr(rpc, "_PING_TIMEOUT_MS", 500)
    address = f"unix:{tmp_path / 'frozen'}"
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    frozen = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FROZEN, address, env=os.environ | paths
    )
    try:
        async with grpc.aio.insecure_channel(address, options=channel_options(True)) as channel:
            stream = channel.stream_stream("/s.S/M")(wait_for_ready=True)
            await stream.write(b"x")
            assert await stream.read() == b"x"
            with pytest.raises(grpc.aio.AioRpcError, match="ping timeout"):
                await asyncio.wait_for(stream.read(), 10)
    finally:
        frozen.kill()
        await frozen.wait()


@pytest.mark.slow
async def test_keepalive_in_real_time() -> None:
    async def silent(request: bytes, context: Any) -> bytes:
        await asyncio.sleep(60)
        return b"done"

    async with hosted({"unary_unary": silent}, link=True) as channel:
        method = channel.unary_unary(f"/{SERVICE}/unary_unary")
        assert await method(b"") == b"done"


async def test_drain_lets_running_calls_end() -> None:
    started = asyncio.Event()

    async def slow(request: bytes, context: Any) -> bytes:
        started.set()
        await asyncio.sleep(0.3)
        return b"done"

    async with (
        running(handlers={"unary_unary": slow}) as host,
        grpc.aio.insecure_channel(host.addresses[0]) as channel,
    ):
        pending = asyncio.ensure_future(call(channel, "unary_unary"))
        await started.wait()
        await host.drain(5)
        assert await pending == [b"done"]
        with pytest.raises(grpc.RpcError) as caught:
            await call(channel, "unary_unary")
        assert from_rpc_error(caught.value).reason is Reason.UNREACHABLE


PROGRAM = """
import asyncio, sys
from specwire.errors import Reason, SpecwireError
from specwire.process import run_service

async def main(stop):
    if sys.argv[1] == "fail":
        raise SpecwireError(Reason.CHECKPOINT_INVALID, "the checkpoint has no layer 3")
    print(type(asyncio.get_running_loop()).__module__, flush=True)
    await stop.wait()
    print("stopped", flush=True)

run_service(main)
"""


def start(mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, mode]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_service_stops_on_signals(number: signal.Signals) -> None:
    with start("run") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "uvloop\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (out, err, process.returncode) == ("stopped\n", "", 0)


def test_run_service_prints_typed_errors_as_one_line() -> None:
    with start("fail") as process:
        out, err = process.communicate(timeout=30)
    assert (out, process.returncode) == ("", 2)
    assert err == "error: the checkpoint has no layer 3\n"
