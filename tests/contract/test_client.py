"""The SDK against a fake coordinator: what it sends, what it returns, when it gives up."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from specwire.client import (
    AsyncClient,
    Client,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateOptions,
    Generation,
)
from specwire.errors import Reason, SpecwireError
from specwire.request import build_request
from specwire.serve import GrpcHost
from specwire.v1 import common_pb2, generate_pb2, generate_pb2_grpc

SERVICE = "specwire.v1.GenerationService"


def delta(text: str, ids: list[int], accepted: int = 0) -> generate_pb2.GenerateResponse:
    part = generate_pb2.Delta(text=text, token_ids=ids, accepted_count=accepted, margins=[0.5])
    return generate_pb2.GenerateResponse(delta=part)


FINAL = generate_pb2.GenerateResponse(
    finished=generate_pb2.Finished(
        reason=common_pb2.FINISH_REASON_STOP_TOKEN,
        stop_token_id=0,
        usage=generate_pb2.Usage(prompt_tokens=5, completion_tokens=3),
        acceptance=generate_pb2.AcceptanceRecord(
            method="dflash",
            rounds=1,
            tau=2.0,
            drafted_by_position=[1, 1],
            accepted_by_position=[1, 0],
            fallbacks={"late": 2},
            phase_ms={"verify": 1.5},
        ),
        sampling=common_pb2.Sampling(temperature=0.0, seed=2**64 - 1),
        request_id="r1",
        exactness=common_pb2.EXACTNESS_EXACT,
    )
)


class FakeCoordinator(generate_pb2_grpc.GenerationServiceServicer):
    """Fails `failures` times, then streams; `script` "endless" goes on until it is cancelled."""

    def __init__(self) -> None:
        self.requests: list[generate_pb2.GenerateRequest] = []
        self.remaining_s: list[float | None] = []
        self.calls = 0
        self.failures: list[SpecwireError] = []
        self.fail_after_first: SpecwireError | None = None
        self.endless = False
        self.without_end = False
        self.started, self.ended = asyncio.Event(), asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> Any:
        self.calls += 1
        self.requests.append(request)
        self.remaining_s.append(context.time_remaining())
        if self.failures:
            raise self.failures.pop(0)
        try:
            self.started.set()
            yield delta("Hel", [1])
            if self.fail_after_first:
                raise self.fail_after_first
            if self.endless:
                await asyncio.Event().wait()
            yield delta("lo", [2, 3], accepted=1)
            if not self.without_end:
                yield FINAL
        finally:
            self.ended.set()

    async def GetInfo(self, request: Any, context: Any) -> Any:
        worker = generate_pb2.GenerationServiceGetInfoResponse.Worker(
            role="draft",
            address="unix:/x",
            state="refused",
            attention=common_pb2.AttentionReport(
                chosen="A",
                candidates=[common_pb2.AttentionReport.Candidate(name="B", reasons=["no GPU"])],
            ),
        )
        return generate_pb2.GenerationServiceGetInfoResponse(
            version="1", protocol_major=1, workers=[worker], methods=["plain"]
        )


Fake = tuple[FakeCoordinator, str]


@pytest.fixture
async def fake(tmp_path: Any) -> AsyncIterator[Fake]:
    host = GrpcHost(address=f"unix:{tmp_path}/c", services=[SERVICE], link=False)
    servicer = FakeCoordinator()
    generate_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, host.server)
    await host.start()
    try:
        yield servicer, host.addresses[0]
    finally:
        await host.drain(0)


async def both(address: str, **options: Any) -> list[Any]:
    """The same generation by both clients, as results or errors."""

    def blocking() -> Any:
        with Client(address) as client:
            try:
                return client.generate(**options)
            except SpecwireError as error:
                return error

    async with AsyncClient(address) as client:
        try:
            first: Any = await client.generate(**options)
        except SpecwireError as error:
            first = error
    return [first, await asyncio.to_thread(blocking)]


async def test_a_whole_generation(fake: Fake) -> None:
    for result in await both(fake[1], prompt="x"):
        assert (result.text, result.token_ids) == ("Hello", (1, 2, 3))
        assert result.margins == (0.5, 0.5)
        assert result.finish_reason is FinishReason.STOP_TOKEN and result.stop_token_id == 0
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (5, 3)
        assert result.acceptance.accepted_by_position == (1, 0)
        assert result.acceptance.fallbacks == {"late": 2}
        assert result.acceptance.phase_ms == {"verify": 1.5}
        assert (result.sampling.temperature, result.sampling.top_p) == (0.0, 1.0)
        assert result.sampling.seed == 2**64 - 1
        assert (result.request_id, result.exactness) == ("r1", "exact")


async def test_streams_of_typed_events(fake: Fake) -> None:
    def check(events: list[Event]) -> None:
        assert [type(event) for event in events] == [Delta, Delta, Finished]
        second = events[1]
        assert isinstance(second, Delta)
        assert (second.text, second.token_ids, second.accepted_count) == ("lo", (2, 3), 1)

    async with AsyncClient(fake[1]) as client:
        check([event async for event in client.stream(token_ids=[1])])

    def blocking() -> list[Event]:
        with Client(fake[1]) as client:
            return list(client.stream(token_ids=[1]))

    check(await asyncio.to_thread(blocking))


async def test_what_is_sent(fake: Fake) -> None:
    servicer, address = fake
    async with AsyncClient(address) as client:
        await client.generate(prompt="")
        await client.generate(
            messages=[{"role": "user", "content": "hé"}],
            max_tokens=0,
            temperature=0.0,
            top_k=0,
            top_p=0.5,
            seed=7,
            stop="\n",
            stop_token_ids=[4],
            ignore_eos=True,
            method="ngram",
            num_speculative_tokens=0,
            exactness="fast",
            timeout_s=5,
            return_token_ids=False,
            return_margins=True,
        )
    empty, full = servicer.requests
    assert empty.WhichOneof("input") == "prompt" and empty.return_token_ids
    assert not empty.sampling.HasField("temperature") and not empty.HasField("max_tokens")
    assert full.chat.messages[0].content == "hé"
    assert full.HasField("max_tokens") and full.sampling.HasField("temperature")
    assert (full.sampling.top_p, full.sampling.seed) == (0.5, 7)
    assert (list(full.stop), list(full.stop_token_ids), full.ignore_eos) == (["\n"], [4], True)
    assert full.speculation.method == "ngram"
    assert full.speculation.HasField("num_speculative_tokens")
    assert full.exactness == common_pb2.EXACTNESS_FAST
    assert full.return_margins and not full.return_token_ids
    unlimited, limited = servicer.remaining_s
    assert unlimited is None or unlimited > 1e6
    assert limited is not None and 4 < limited < 5.5


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "input"),
        ({"prompt": "secret", "token_ids": [1]}, "input"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "secret\ud800"}, "prompt"),
        ({"messages": "secret"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"prompt": "secret", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "secret", "seed": 2**64}, "seed"),
        ({"prompt": "secret", "stop": [1]}, "stop"),
        ({"prompt": "secret", "exactness": "maybe"}, "exactness"),
        ({"prompt": "secret", "exactness": ["exact"]}, "exactness"),
        ({"prompt": "secret", "timeout_s": 0}, "timeout_s"),
        ({"prompt": "secret", "timeout_s": "1"}, "timeout_s"),
        ({"prompt": "secret", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "secret", "return_token_ids": "yes"}, "return_token_ids"),
        ({"prompt": "secret", "bad_sequences": 5}, "bad_sequences"),
        ({"prompt": "secret", "structured_output": "json"}, "structured_output"),
        ({"prompt": "secret", "max_new_tokens": 4}, "max_new_tokens"),
    ],
)
async def test_bad_arguments_are_named_before_anything_is_sent(
    fake: Fake, options: dict[str, Any], field: str
) -> None:
    for error in await both(fake[1], **options):
        assert isinstance(error, SpecwireError) and error.reason is Reason.FIELD_INVALID
        assert field in (error.metadata["field"], error.metadata["value"].strip("'"))
        assert "secret" not in error.message
        assert "interpreted" not in error.message
    assert fake[0].calls == 0


@pytest.mark.parametrize(
    "address",
    [
        *("", "nonsense", "unix:", "127.0.0.1:99999", "127.0.0.1:0", "unix:/" + 107 * "x"),
        *("http://127.0.0.1:7070", "https://host:443", "grpc://host:7070", "./c:7070", 7070, None),
    ],
)
async def test_an_address_that_cannot_be_is_named(address: Any) -> None:
    """gRPC would connect to another port, say that a server is away, or that it made no channel."""
    for kind in (Client, AsyncClient):
        with pytest.raises(SpecwireError) as caught:
            kind(address)
        assert caught.value.metadata["field"] == "address"


async def test_an_endless_timeout_does_not_end_at_once(fake: Fake) -> None:
    for result in await both(fake[1], prompt="x", timeout_s=float("inf")):
        assert isinstance(result, Generation)


async def test_errors_are_typed_and_not_repeated(fake: Fake) -> None:
    servicer, address = fake
    error = SpecwireError.field("max_tokens", 9, "up to 8", Reason.PROMPT_TOO_LONG)
    servicer.failures = [error, error]
    for caught in await both(address, prompt="x"):
        assert (caught.reason, caught.metadata) == (Reason.PROMPT_TOO_LONG, error.metadata)
    servicer.failures = [SpecwireError(Reason.QUEUE_FULL, "full") for _ in range(2)]
    for caught in await both(address, prompt="x"):
        assert caught.reason is Reason.QUEUE_FULL and caught.retry_after_ms == 500
    assert servicer.calls == 4


async def test_unavailable_is_tried_again_after_the_named_time(fake: Fake) -> None:
    servicer, address = fake

    def failures(count: int, wait_ms: int) -> list[SpecwireError]:
        error = SpecwireError(Reason.NO_TARGET, "soon", retry_after_ms=wait_ms)
        return [error] * count

    async with AsyncClient(address) as client:
        servicer.failures = failures(2, 100)
        start = time.monotonic()
        assert (await client.generate(prompt="x")).text == "Hello"
        assert time.monotonic() - start >= 0.2 and servicer.calls == 3
        for count, wait_ms, timeout_s, calls in (
            (9, 1, None, 3),  # attempts are limited
            (9, 0, None, 1),  # the server says that trying again does not help
            (9, 60_000, 5, 1),  # no time is left for it
        ):
            servicer.failures, servicer.calls = failures(count, wait_ms), 0
            with pytest.raises(SpecwireError) as caught:
                await client.generate(prompt="x", timeout_s=timeout_s)
            assert caught.value.reason is Reason.NO_TARGET and servicer.calls == calls
    servicer.failures, servicer.calls = failures(2, 1), 0
    await asyncio.to_thread(lambda: Client(address).generate(prompt="x"))
    assert servicer.calls == 3


async def test_nothing_is_repeated_after_the_first_message(fake: Fake) -> None:
    servicer, address = fake
    servicer.fail_after_first = SpecwireError(Reason.ENGINE_DOWN, "gone")
    for caught in await both(address, prompt="x"):
        assert caught.reason is Reason.ENGINE_DOWN
    assert servicer.calls == 2


async def test_an_answer_that_is_cut_is_told_apart_from_nobody_there(fake: Fake) -> None:
    servicer, address = fake
    servicer.fail_after_first = SpecwireError(Reason.UNREACHABLE, "no coordinator answers")
    for caught in await both(address, prompt="x"):
        assert caught.reason is Reason.UNREACHABLE and "the rest is missing" in caught.message


async def test_a_stream_without_its_end_is_an_error(fake: Fake) -> None:
    fake[0].without_end = True
    for caught in await both(fake[1], prompt="x"):
        assert caught.reason is Reason.INTERNAL and "final message" in caught.message


async def test_nobody_there(tmp_path: Any) -> None:
    """The address and what to do, none of the library's words about sockets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed_port = f"127.0.0.1:{free.getsockname()[1]}"
    for address in (f"unix:{tmp_path}/none", closed_port):
        for caught in await both(address, prompt="x"):
            assert caught.reason is Reason.UNREACHABLE and caught.code.name == "UNAVAILABLE"
            assert caught.metadata == {"address": address, "role": "coordinator"}
            assert f"no coordinator answers at {address}" in caught.message
            assert "check that it runs" in caught.message
            assert "errno" not in caught.message.lower() and "ipv4" not in caught.message
        with pytest.raises(SpecwireError, match="no coordinator answers at"):
            await asyncio.to_thread(Client(address).info)


async def test_somebody_else_there_and_nobody_who_speaks(tmp_path: Any) -> None:
    """A server of other services, and a socket that takes connections and never says a word."""
    address, silent = f"unix:{tmp_path}/other", f"unix:{tmp_path}/silent"
    other = grpc.aio.server()
    other.add_insecure_port(address)
    await other.start()
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(silent.removeprefix("unix:"))
        mute.listen()
        for caught in await both(address, prompt="x"):
            assert caught.reason is Reason.UNSUPPORTED
            assert f"what answers at {address} is no Specwire coordinator" in caught.message
            assert "or an older one" in caught.message
        for caught in await both(silent, prompt="x", timeout_s=0.3):
            assert caught.reason in (Reason.DEADLINE, Reason.UNREACHABLE)
            assert silent in caught.message and "coordinator" in caught.message
            assert "Exceeded" not in caught.message
    await other.stop(0)


def test_an_async_client_outside_of_a_loop_says_so() -> None:
    with pytest.raises(SpecwireError, match="inside a running event loop"):
        AsyncClient("127.0.0.1:7070")


def test_none_is_as_left_out() -> None:
    given: Any = dict.fromkeys(GenerateOptions.__annotations__)
    assert build_request({**given, "prompt": "x"}) == build_request({"prompt": "x"})


@pytest.mark.parametrize("ask", ["generate", "info"])
async def test_a_client_that_another_thread_closes_meanwhile_says_so(fake: Fake, ask: str) -> None:
    """Between the question whether it is open and the call: gRPC raises a ValueError there."""
    client = Client(fake[1])
    check = client._check_open

    def closed_behind_it() -> None:
        check()
        client.close()

    client._check_open = closed_behind_it  # type: ignore[method-assign]
    asked = client.info if ask == "info" else lambda: client.generate(prompt="x")
    with pytest.raises(SpecwireError, match="the client is closed"):
        await asyncio.to_thread(asked)


async def test_a_closed_client_says_so(fake: Fake) -> None:
    def closed(error: SpecwireError) -> bool:
        return error.reason is Reason.CANCELLED and "the client is closed" in error.message

    client = AsyncClient(fake[1])
    unread = client.stream(prompt="x")
    await client.close()
    await client.close()
    for ask in (client.info, lambda: client.generate(prompt="x"), lambda: anext(unread)):
        with pytest.raises(SpecwireError) as caught:
            await ask()
        assert closed(caught.value)

    def blocking() -> list[SpecwireError]:
        client, errors = Client(fake[1]), []
        unread = client.stream(prompt="x")
        client.close()
        client.close()
        for ask in (client.info, lambda: client.generate(prompt="x"), lambda: next(unread)):
            with pytest.raises(SpecwireError) as caught:
                ask()
            errors.append(caught.value)
        return errors

    assert all(map(closed, await asyncio.to_thread(blocking)))
    assert fake[0].calls == 0


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_closing_ends_what_runs_with_a_typed_error(fake: Fake, kind: Any) -> None:
    servicer, address = fake
    servicer.endless = True
    client = kind(address)

    async def run() -> None:
        if kind is Client:
            await asyncio.to_thread(client.generate, prompt="x")
        else:
            await client.generate(prompt="x")

    running = asyncio.create_task(run())
    await asyncio.wait_for(servicer.started.wait(), 10)
    result = client.close()
    if result is not None:
        await result
    with pytest.raises(SpecwireError, match="the client is closed"):
        await asyncio.wait_for(running, 10)


async def test_deadline_ends_the_call_on_both_sides(fake: Fake) -> None:
    servicer, address = fake
    servicer.endless = True
    for caught in await both(address, prompt="x", timeout_s=0.3):
        assert caught.reason is Reason.DEADLINE
        text = "the answer took longer than timeout_s = 0.3: the rest is missing"
        assert caught.message == text
    await asyncio.wait_for(servicer.ended.wait(), 10)


async def leave(address: str, ended: asyncio.Event, how: Callable[[Any], Any]) -> None:
    async with AsyncClient(address) as client:
        stream = client.stream(prompt="x")
        assert isinstance(await anext(stream), Delta)
        result = how(stream)
        if result is not None:
            await result
        del stream, result
        gc.collect()
        # The client stays open: only the stream was left.
        await asyncio.wait_for(ended.wait(), 10)


@pytest.mark.parametrize("how", ["cancel", "aclose", "drop"])
async def test_leaving_an_async_stream_cancels_at_the_server(fake: Fake, how: str) -> None:
    servicer, address = fake
    servicer.endless = True
    await leave(
        address,
        servicer.ended,
        lambda stream: getattr(stream, how)() if how != "drop" else None,
    )


async def test_cancelling_the_task_cancels_at_the_server(fake: Fake) -> None:
    servicer, address = fake
    servicer.endless = True
    async with AsyncClient(address) as client:
        task = asyncio.create_task(client.generate(prompt="x"))
        await servicer.started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(servicer.ended.wait(), 10)


@pytest.mark.parametrize("how", ["cancel", "close", "break", "drop"])
async def test_leaving_a_blocking_stream_cancels_at_the_server(fake: Fake, how: str) -> None:
    servicer, address = fake
    servicer.endless = True

    seen = threading.Event()

    def blocking() -> None:
        with Client(address) as client:
            if how == "break":
                for _ in client.stream(prompt="x"):
                    break
            else:
                stream = client.stream(prompt="x")
                next(stream)
                if how != "drop":
                    getattr(stream, how)()
                    assert list(stream) == []
                del stream
            assert seen.wait(10)  # the client stays open: only the stream was left

    running = asyncio.create_task(asyncio.to_thread(blocking))
    await asyncio.wait_for(servicer.ended.wait(), 10)
    seen.set()
    await running


async def test_a_cancelled_stream_ends_quietly(fake: Fake) -> None:
    fake[0].endless = True
    async with AsyncClient(fake[1]) as client, client.stream(prompt="x") as stream:
        await anext(stream)
        asyncio.get_running_loop().call_later(0.1, stream.cancel)
        assert [event async for event in stream] == []


async def test_info(fake: Fake) -> None:
    async with AsyncClient(fake[1]) as client:
        info = await client.info()
    with Client(fake[1]) as blocking:
        assert await asyncio.to_thread(blocking.info) == info
    assert (info.protocol, info.methods) == ((1, 0), ("plain",))
    assert info.workers[0].state == "refused"
    assert info.workers[0].attention.candidates == {"B": ("no GPU",)}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt": 5}, "prompt is of type int; accepted: text in valid Unicode; ids of tokens go"),
        ({"prompt": [1, 2]}, "prompt is of type list; accepted: text"),
        ({"prompt": "\ud800"}, "prompt has lone surrogates; accepted: text in valid Unicode"),
        ({"messages": "hi"}, "messages is of type str; accepted: a list of mappings with `role`"),
        ({"messages": {"role": "user"}}, "messages is of type dict; accepted: a list of"),
        ({"messages": [{"role": "user", "content": "x"}, "hi"]}, "messages[1] is of type str"),
        ({"messages": [{"role": "user"}]}, "messages[0] has no content; accepted: one of mappings"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content is of type list"),
    ],
)
def test_what_is_no_text_is_told_by_its_place_and_type(options: Any, said: str) -> None:
    with pytest.raises(SpecwireError) as caught:
        build_request(options)
    assert caught.value.message.startswith(said)


async def test_a_prompt_needs_no_name(fake: Fake) -> None:
    servicer, address = fake
    async with AsyncClient(address) as client:
        assert (await client.generate("hello", max_tokens=4)).text == "Hello"
        with pytest.raises(SpecwireError, match="input is 'prompt twice'"):
            client.stream("hello", prompt="other")
    assert [request.prompt for request in servicer.requests] == ["hello"]
    assert "unset: as many as the model's context still holds" in str(Client.generate.__doc__)
    named = set(re.findall(r"\w+", str(Client.generate.__doc__)))
    assert GenerateOptions.__annotations__.keys() <= named
