"""The target service as a whole: handshake, tokenizer, batching, free run, shutdown."""

from __future__ import annotations

import asyncio
import hashlib

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specwire.errors import SpecwireError, from_rpc_error
from specwire.v1 import common_pb2, target_pb2
from target_svc.app import Loaded, TargetApp
from target_svc.settings import TargetSettings
from tests.service.target_harness import (
    TOKENIZER,
    Peer,
    Target,
    key,
    open_target,
    target,
    verify,
)
from tests.service.toy_engine import EOS, HIDDEN, LAYERS, VOCAB, ToyEngine, continuation

PROMPT = [5, 6, 7]
TEXT = continuation(PROMPT, 80)


async def test_info() -> None:
    async with target(ToyEngine(rows_independent=False), exactness="fast") as service:
        info = await service.stub.GetInfo(target_pb2.TargetServiceGetInfoRequest())
        assert info.worker.incarnation and info.worker.protocol_major == 1
        model = info.model
        assert (model.vocab_size, model.hidden_size, model.layer_count) == (VOCAB, HIDDEN, LAYERS)
        assert list(model.eos_token_ids) == [EOS] and model.max_length_tokens == 512
        assert model.tokenizer_hash == hashlib.sha256(TOKENIZER).hexdigest()
        assert [list(c.reasons) for c in info.attention.candidates] == [[], ["no"]]
        assert info.attention.chosen == "TOY" and info.numerics_fingerprint == "toy-cpu"
        assert list(info.contract_levels) == ["L0", "L1", "L2"]
        assert info.default_exactness == common_pb2.EXACTNESS_FAST
        assert info.load.pages_free == info.load.pages_total == 64
    async with target() as service:
        info = await service.stub.GetInfo(target_pb2.TargetServiceGetInfoRequest())
        assert list(info.contract_levels) == ["L0", "L1", "L2", "L3"]


async def test_tokenizer() -> None:
    async with target() as service:
        call = service.stub.GetTokenizer(target_pb2.GetTokenizerRequest(known_hash="old"))
        parts = [part async for part in call]
        assert b"".join(p.chunk for p in parts) == TOKENIZER and len(parts) == 3
        known = target_pb2.GetTokenizerRequest(known_hash=parts[0].hash)
        again = [part async for part in service.stub.GetTokenizer(known)]
        assert len(again) == 1 and not again[0].chunk


async def test_what_is_ready_is_one_step() -> None:
    """Verify steps of all sessions and one prompt chunk go together: nobody stalls."""
    long, other = [[(i + shift) % 900 for i in range(200)] for shift in (0, 1)]
    async with target(prefill_chunk_tokens=32) as service:
        peer, engine = service.peer(), service.engine
        await peer.send(*(open_target(PROMPT, at=key(i)) for i in (1, 2, 3)))
        for _ in range(3):
            await peer.verdict()
        engine.log.clear()
        engine.entered.clear()
        engine.gate.clear()
        await peer.send(open_target(long, at=key(4)))
        await asyncio.to_thread(engine.entered.wait, 5)
        await peer.send(open_target(other, at=key(5)))
        await peer.send(*(verify(1, 4, TEXT[1:3], at=key(i)) for i in (1, 2, 3)))
        await peer.heartbeat()
        engine.gate.set()
        verdicts = [await peer.verdict() for _ in range(5)]
        assert {v.key.session_id for v in verdicts[:3]} == {1, 2, 3}
        second = engine.log[1]
        assert sorted(len(ids) for _, ids, _ in second) == [3, 3, 3, 32]
        # The two prompts share the budget, chunk by chunk.
        assert [items[0][0] for items in engine.log[2:6]] == [0, 64, 32, 96]
        for verdict, prompt in zip(verdicts[3:], (long, other), strict=True):
            assert list(verdict.tokens) == continuation(prompt, 1)


async def test_chunks_lie_on_the_engines_grid() -> None:
    async with target(ToyEngine(chunk=32)) as service:
        peer = service.peer()
        await peer.send(open_target(list(range(70))))
        await peer.verdict()
        assert [step[0][:1] for step in service.engine.log] == [(0,), (32,), (64,)]
        assert [step[0][2] for step in service.engine.log] == [0, 0, 1]


async def test_a_reopen_runs_committed_tokens_in_blocks_where_rows_depend() -> None:
    ids = [*PROMPT, *TEXT[:20]]
    async with target(ToyEngine(rows_independent=False)) as service:
        peer = service.peer()
        await peer.send(open_target(ids, prompt_len=3))
        assert list((await peer.verdict()).tokens) == TEXT[20:21]
        assert [len(step[0][1]) for step in service.engine.log] == [3, 8, 8, 4]


async def _collect(peer: Peer, count: int) -> list[target_pb2.Verdict]:
    return [await peer.verdict() for _ in range(count)]


async def test_free_run_after_open_and_verify() -> None:
    async with target() as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, free_run=5))
        verdicts = await _collect(peer, 6)
        assert [v.step_id for v in verdicts] == list(range(6))
        assert [t for v in verdicts for t in v.tokens] == TEXT[:6]
        assert await peer.heartbeat() == []  # no more than asked for
        await peer.send(verify(6, 9, TEXT[6:8], free_run=100))
        more = await _collect(peer, 56)
        assert [t for v in more for t in v.tokens] == TEXT[6:64]
        assert more[-1].finish == common_pb2.FINISH_REASON_LENGTH
        assert await peer.heartbeat() == []


async def test_a_new_item_ends_a_free_run() -> None:
    async with target(ToyEngine(step_s=0.01)) as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, free_run=1000, max_new=400))
        await _collect(peer, 3)
        await peer.send(verify(1001, 4, TEXT[1:5]))
        while (verdict := await peer.verdict()).step_id != 1001:
            pass
        assert (verdict.base_len, list(verdict.tokens)) == (4, TEXT[1:6])
        steps = len(service.engine.log)
        await asyncio.sleep(0.1)
        assert len(service.engine.log) == steps
        await peer.send(verify(1002, 9, free_run=1000), target_pb2.CloseSession(key=key()))
        await service.until_idle()


async def _health(service: Target, name: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(service.channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=name))).status)


async def test_health_and_loading(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Before the engine is warm: NOT_SERVING, and a typed refusal."""
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(_: TargetSettings) -> Loaded:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
        return Loaded(ToyEngine(), TOKENIZER)

    address = f"unix:{tmp_path_factory.mktemp('t') / 't.sock'}"
    app = TargetApp(TargetSettings(address=address, drain_ms=0), slow)
    starting = asyncio.ensure_future(app.start())
    async with grpc.aio.insecure_channel(address) as channel:
        service = Target(app, ToyEngine(), channel)
        await asyncio.wait_for(channel.channel_ready(), 5)
        assert await _health(service) == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.stub.GetInfo(target_pb2.TargetServiceGetInfoRequest())
        assert from_rpc_error(caught.value).reason == "ENGINE_DOWN"
        release.set()
        await starting
        for name in ("", "specwire.v1.TargetService"):
            assert await _health(service, name) == health_pb2.HealthCheckResponse.SERVING
    await app.stop()


async def test_draining() -> None:
    """New sessions are refused, running ones end; then the service stops."""
    async with target(drain_ms=5000) as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT))
        await peer.verdict()
        stopping = asyncio.ensure_future(service.app.stop())
        await asyncio.sleep(0.05)
        assert await _health(service) == health_pb2.HealthCheckResponse.NOT_SERVING
        await peer.send(open_target(PROMPT, at=key(2)))
        assert (await peer.refused()).error.reason == "DRAINING"
        await peer.send(verify(1, 4, TEXT[1:3]))
        assert (await peer.verdict()).new_len == 7
        await peer.send(target_pb2.CloseSession(key=key()))
        await asyncio.wait_for(stopping, 3)


async def test_an_engine_that_is_given_up_is_an_error() -> None:
    async with target() as service:
        stop, app = asyncio.Event(), service.app
        waiting = asyncio.ensure_future(app.wait(stop))
        app.engine_down.set()
        with pytest.raises(SpecwireError, match="the engine was given up"):
            await asyncio.wait_for(waiting, 3)
        stop.set()
        await app.wait(stop)  # told to end all the same, it ends in order


def test_settings() -> None:
    loaded = TargetSettings.load(["--kv-pages", "12", "--push-allow", "unix:*,draft:7002"])
    assert loaded.kv_pages == 12 and loaded.push_allow == ("unix:*", "draft:7002")
    with pytest.raises(SpecwireError) as caught:
        TargetSettings.load(["--max-draft-tokens", "-1"])
    assert caught.value.reason == "SETTINGS_INVALID"
    assert caught.value.metadata["field"] == "max_draft_tokens"


async def test_draining_does_not_wait_for_those_who_left() -> None:
    async with target(drain_ms=60_000) as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT))
        await peer.verdict()
        peer.call.cancel()
        other = service.peer()
        await other.send(open_target(PROMPT, at=key(2)), target_pb2.CloseSession(key=key(2)))
        assert (await other.reply()).HasField("closed")
        await asyncio.wait_for(service.app.stop(), 3)
