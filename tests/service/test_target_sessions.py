"""Sessions of a target over gRPC: generations, leases, queueing, deadlines, cancels, bad items."""

from __future__ import annotations

import asyncio
import random

import pytest

from specwire.v1 import common_pb2, target_pb2
from tests.service.target_harness import Target, key, open_target, target, verify
from tests.service.toy_engine import ToyEngine, continuation

PROMPT = [5, 6, 7]
TEXT = continuation(PROMPT, 40)


def close(at: common_pb2.SessionKey) -> target_pb2.CloseSession:
    return target_pb2.CloseSession(key=at)


async def test_generations() -> None:
    """WC-5, WC-36, WC-11: a newer generation replaces; whatever an older one sends is dropped."""
    old, new = key(generation=1), key(generation=2)
    async with target() as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, at=old))
        await peer.verdict()
        await peer.send(open_target([9, 9], at=new))
        opened = await peer.verdict()
        assert opened.key == new and list(opened.tokens) == continuation([9, 9], 1)
        await peer.send(verify(7, 4, [1], at=old), open_target(PROMPT, at=old), close(old))
        closed = await peer.reply()
        assert closed.closed.key == old
        await peer.send(verify(1, 3, at=new))
        assert list((await peer.verdict()).tokens) == continuation([9, 9], 2)[1:]
        assert service.count("dropped", cause="stale_generation") == 3
        assert await peer.heartbeat(old, new) == [1]
        assert len(service.app.scheduler.sessions) == 1


async def test_replaced_in_the_middle_of_a_step() -> None:
    async with target() as service:
        peer = service.peer()
        service.engine.gate.clear()
        await peer.send(open_target(PROMPT, at=key(generation=1)))
        await asyncio.to_thread(service.engine.entered.wait, 5)
        await peer.send(open_target([9], at=key(generation=2)))
        await peer.heartbeat()
        service.engine.gate.set()
        verdict = await peer.verdict()
        assert verdict.key.generation == 2 and list(verdict.tokens) == continuation([9], 1)
        await peer.send(close(key(generation=2)))
        await service.until_idle()


async def test_close_is_idempotent_and_final() -> None:
    async with target() as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT))
        await peer.verdict()
        await peer.send(close(key()), close(key()), close(key(77)))
        for _ in range(3):
            assert (await peer.reply()).HasField("closed")
        await service.until_idle()
        await peer.send(open_target(PROMPT))  # a late duplicate revives nothing
        assert await peer.heartbeat(key()) == [1]
        await peer.send(verify(1, 4))
        assert (await peer.refused()).error.reason == "SESSION_UNKNOWN"


async def test_the_end_of_a_stream_closes_nothing() -> None:
    async with target() as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT))
        await peer.verdict()
        service.engine.gate.clear()
        await peer.send(verify(1, 4, TEXT[1:4]))
        await peer.heartbeat()
        peer.call.cancel()
        again = service.peer()
        await again.send(verify(1, 4, TEXT[1:4]))
        await again.heartbeat()
        service.engine.gate.set()
        assert list((await again.verdict()).tokens) == TEXT[1:5]


async def test_leases() -> None:
    """WC-6: a coordinator that dies frees its sessions after the lease; a heartbeat keeps them."""
    async with target() as service:
        peer = service.peer()
        keys = [key(i) for i in range(8)]
        await peer.send(*(open_target(PROMPT, at=k, lease_ms=1200) for k in keys))
        for _ in keys:
            await peer.verdict()
        for _ in range(5):
            await asyncio.sleep(0.3)
            assert await peer.heartbeat(keys[0], keys[1]) == []
        assert len(service.app.scheduler.sessions) == 2
        assert service.count("dropped", cause="lease_expired") == 6
        peer.call.cancel()
        await service.until_idle(2)


async def test_no_lease_ends_in_the_middle_of_a_step() -> None:
    async with target() as service:
        peer = service.peer()
        service.engine.gate.clear()
        await peer.send(open_target(PROMPT, lease_ms=600))
        await peer.heartbeat()
        await asyncio.sleep(0.9)
        service.engine.gate.set()
        assert (await peer.verdict()).new_len == 4
        await peer.send(verify(1, 4))
        assert (await peer.verdict()).new_len == 5


async def test_admission_queue() -> None:
    """Pages for the prompt must be free; who does not fit waits in order, or is refused."""
    prompts = [[i, *range(40)] for i in range(6)]
    async with target(ToyEngine(pages=4), max_waiting=2, preempt_idle_ms=60_000) as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, max_new=200, at=key(1)))
        never = await peer.refused()
        assert never.error.reason == "KV_PAGES_EXHAUSTED" and never.error.retry_after_ms == 0
        assert (never.error.metadata["needed"], never.error.metadata["total"]) == ("13", "4")
        await peer.send(open_target(prompts[2], max_new=20, at=key(2)))
        await peer.verdict()
        await peer.send(*(open_target(prompts[i], max_new=20, at=key(i)) for i in (3, 4)))
        await peer.heartbeat()
        assert (peer.load.waiting, peer.load.pages_free, peer.load.preempted) == (2, 1, 0)
        await peer.send(open_target(prompts[5], max_new=20, at=key(5)))
        assert (await peer.refused()).error.reason == "QUEUE_FULL"
        await peer.send(close(key(3)))  # leaves the queue
        await peer.reply()
        await peer.send(close(key(2)))
        await peer.reply()
        verdict = await peer.verdict()
        assert verdict.key.session_id == 4 and verdict.timings.queue_ns > 0
        await peer.send(close(key(4)))
        await service.until_idle()


async def test_deadlines() -> None:
    prompt = list(range(60))
    async with target(ToyEngine(pages=4), preempt_idle_ms=60_000) as service:
        peer = service.peer()
        await peer.send(open_target(prompt, max_new=4))
        await peer.verdict()
        await peer.send(open_target([9, *prompt], max_new=2, at=key(2), deadline_ms=60))
        waited = await peer.refused()
        assert waited.key.session_id == 2 and waited.error.reason == "DEADLINE"
        service.engine.gate.clear()
        await peer.send(verify(1, 61), verify(2, 62, deadline_ms=30))
        await peer.heartbeat()
        await asyncio.sleep(0.1)
        service.engine.gate.set()
        assert (await peer.verdict()).step_id == 1
        refused = await peer.refused()
        assert (refused.step_id, refused.error.reason, refused.have_len) == (2, "DEADLINE", 62)
        await peer.send(verify(3, 62))
        assert (await peer.verdict()).new_len == 63


BAD = [
    ({"ids": b"abc"}, "FIELD_INVALID", "ids"),
    ({"ids": b""}, "FIELD_INVALID", "ids"),
    ({"ids": b"\xff\xff\xff\xff"}, "VOCAB_RANGE", "ids"),
    ({"ids": bytes(4 * 600)}, "PROMPT_TOO_LONG", "ids"),
    ({"max_new_tokens": 0}, "FIELD_INVALID", "max_new_tokens"),
    ({"prompt_len": 4}, "FIELD_INVALID", "prompt_len"),
    ({"rows_from": 4}, "FIELD_INVALID", "rows_from"),
    ({"exactness": 9}, "FIELD_INVALID", "exactness"),
    ({"sampling": {"temperature": float("nan")}}, "FIELD_INVALID", "sampling.temperature"),
    ({"sampling": {"temperature": -1.0}}, "FIELD_INVALID", "sampling.temperature"),
    ({"sampling": {"top_p": 0.0, "seed": 1}}, "FIELD_INVALID", "sampling.top_p"),
    ({"sampling": {"temperature": 0.8}}, "FIELD_INVALID", "sampling.seed"),
]


@pytest.mark.parametrize(("fields", "reason", "field"), BAD)
async def test_bad_opens(fields: dict[str, object], reason: str, field: str) -> None:
    async with target() as service:
        peer = service.peer()
        request = open_target(PROMPT)
        request.MergeFrom(
            target_pb2.OpenTarget(**{k: v for k, v in fields.items() if k != "sampling"})
        )
        for name in ("ids", "max_new_tokens"):
            if name in fields:
                setattr(request, name, fields[name])
        if "sampling" in fields:
            request.sampling.CopyFrom(common_pb2.Sampling(**fields["sampling"]))
        await peer.send(request)
        refused = await peer.refused()
        assert refused.error.reason == reason and refused.error.metadata["field"] == field
        await service.until_idle()


async def test_prompt_log_probabilities_that_fit_no_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sent all the same they would end the link, for every session on it."""
    monkeypatch.setattr("specwire.sampling.MAX_PROMPT_SCORES", 12)
    async with target() as service:
        peer = service.peer()
        await peer.send(open_target([1] * 4, prompt_logprobs=3))
        error = (await peer.refused()).error
        assert error.metadata["field"] == "prompt_logprobs"
        assert error.metadata["accepted"] == "0 to 2 for a prompt of 4 tokens"
        await peer.send(open_target([1] * 4, prompt_logprobs=2))
        assert len((await peer.verdict()).prompt_logprobs) == 3


async def test_bad_items_fail_alone() -> None:
    """WC-13: garbage beside good items of the same frame; nothing kills the reader."""
    async with target() as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT))
        await peer.verdict()
        nobody = common_pb2.SessionKey()
        frame = target_pb2.TargetServiceLinkRequest(
            items=[
                target_pb2.TargetItem(),
                target_pb2.TargetItem(verify=verify(1, 4, at=nobody)),
                target_pb2.TargetItem(verify=verify(1, 0)),
                target_pb2.TargetItem(verify=verify(1, 4, then_propose=3)),
                target_pb2.TargetItem(export_rows=target_pb2.ExportRows(key=key())),
                target_pb2.TargetItem(close=target_pb2.CloseSession()),
                target_pb2.TargetItem(verify=verify(1, 4, TEXT[1:3])),
            ]
        )
        await peer.call.write(frame)
        reasons = [(await peer.refused()).error.reason for _ in range(5)]
        assert reasons == [
            "FIELD_INVALID",
            "FIELD_INVALID",
            "UNSUPPORTED",
            "ROWS_REFUSED",
            "FIELD_INVALID",
        ]
        assert list((await peer.verdict()).tokens) == TEXT[1:4]
        assert service.count("dropped", cause="empty_item") == 1


async def test_engine_failures() -> None:
    """A failed step ends its sessions only; after three in a row the engine is given up."""
    async with target() as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT))
        await peer.verdict()
        for attempt in range(2, 5):
            service.engine.fail_steps = 1
            await peer.send(open_target(PROMPT, at=key(attempt)))
            refused = await peer.refused()
            assert refused.error.reason == ("INTERNAL" if attempt < 4 else "ENGINE_DOWN")
            assert "toy failure" not in refused.error.message
        assert service.app.engine_down.is_set()
        await peer.send(open_target(PROMPT, at=key(9)))
        assert (await peer.refused()).error.reason == "ENGINE_DOWN"


async def _one_client(service: Target, number: int, dice: random.Random) -> None:
    """Opens, verifies a few times with drafts good and bad, and vanishes somewhere."""
    peer, at = service.peer(), key(number)
    stop_after = dice.randrange(6)
    await peer.send(open_target([number], max_new=20, at=at, lease_ms=10_000))
    truth = continuation([number], 40)
    if stop_after:
        verdict = await peer.verdict()
        got = list(verdict.tokens)
        for step in range(1, stop_after):
            if verdict.finish:
                break
            draft = truth[len(got) : len(got) + dice.randrange(5)]
            draft += [dice.randrange(2000)] * dice.randrange(2)
            await peer.send(verify(step, verdict.new_len, draft, at=at))
            verdict = await peer.verdict()
            got += verdict.tokens
        assert got == truth[: len(got)]
    if dice.random() < 0.5:
        await peer.send(close(at))
    else:  # its lease ends soon
        await peer.send(target_pb2.Heartbeat(coordinator=1, sessions=[at], lease_ms=100))
    await peer.reply()
    peer.call.cancel()


async def test_a_hundred_sessions_with_random_cancels_leave_nothing() -> None:
    """WC-8: also when they have to wait for pages, and whether they close or just vanish."""
    async with target(ToyEngine(pages=24), max_waiting=100) as service:
        dice = random.Random(5)
        rounds = [_one_client(service, n, random.Random(dice.random())) for n in range(1, 101)]
        await asyncio.gather(*rounds)
        await service.until_idle(3)
