"""Too few pages for all: sessions give theirs away and go on later, and nobody sees more than
time."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from specwire.v1 import common_pb2, target_pb2
from target_svc.sessions import Key
from tests.service.target_harness import (
    FakeDraft,
    Peer,
    Target,
    draft_server,
    key,
    open_target,
    push_to,
    target,
    verify,
)
from tests.service.test_target_rows import expected, joined
from tests.service.toy_engine import ToyEngine, continuation


async def generate(
    service: Target, number: int, prompt: list[int], count: int, dice: random.Random, **fields: Any
) -> list[int]:
    """One session from open to its last token, with drafts good and bad, on a link of its own."""
    seed = fields.pop("seed", number)
    truth = continuation(prompt, count + 8, seed)
    peer, at = service.peer(), key(number)
    sampling = common_pb2.Sampling(temperature=0.8, seed=seed)
    await peer.send(open_target(prompt, count, at, sampling=sampling, **fields))
    reply = await peer.reply(30)
    got = list(reply.verdict.tokens)
    step = 0
    while not reply.verdict.finish:
        assert reply.HasField("verdict"), reply
        step += 1
        draft = truth[len(got) : len(got) + dice.randrange(6)]
        if draft and dice.random() < 0.5:
            draft[-1] = (draft[-1] + 1) % 999
        await peer.send(verify(step, len(prompt) + len(got), draft, at=at))
        reply = await peer.reply(30)
        got += reply.verdict.tokens
    await peer.send(target_pb2.CloseSession(key=at))
    await peer.reply()
    peer.call.cancel()
    assert got == truth[:count]
    return got


@pytest.mark.parametrize("independent", [True, False])
@pytest.mark.parametrize("no_prefix_cache", [True, False])
async def test_preempted_sessions_give_the_same_tokens(
    independent: bool, no_prefix_cache: bool
) -> None:
    """WC-7, WC-9, WC-10, WC-35: eight sessions of up to 12 pages each share 20; the toy engine
    would give other tokens for KV that is missing or another's."""
    engine = ToyEngine(pages=20, page_tokens=4, rows_independent=independent, chunk=8)
    async with target(engine, preempt_idle_ms=50) as service:
        dice = random.Random(3)
        sessions = [
            generate(
                service,
                n,
                [n % 3] * dice.randrange(1, 20),
                24,
                random.Random(n),
                no_prefix_cache=no_prefix_cache,
            )
            for n in range(1, 9)
        ]
        await asyncio.gather(*sessions)
        assert service.count("preemptions") > 0
        await service.until_idle()


async def test_a_session_that_waits_for_its_pages_keeps_its_ids_only() -> None:
    """The victim is the one that came last; it runs again when there is room, then its step."""
    engine = ToyEngine(pages=8, page_tokens=4)
    async with target(engine, preempt_idle_ms=60_000) as service:
        peer = service.peer()
        first, second = [1] * 8, [2] * 9
        text = continuation(first, 24), continuation(second, 6)
        await peer.send(open_target(first, 24, key(1), no_prefix_cache=True))
        await peer.verdict()
        await peer.send(open_target(second, 6, key(2), no_prefix_cache=True))
        await peer.verdict()
        for step, have in enumerate((1, 5, 9, 13), start=1):
            assert peer.load.preempted == 0
            await peer.send(verify(step, 8 + have, text[0][have : have + 3], at=key(1)))
            assert (await peer.verdict()).new_len == 12 + have
        assert peer.load.preempted == 1 and service.count("preemptions") == 1
        await peer.send(verify(1, 10, text[1][1:4], at=key(2)))
        assert await peer.heartbeat(key(2)) == []
        assert peer.load.preempted == 1
        engine.log.clear()
        await peer.send(target_pb2.CloseSession(key=key(1)))
        await peer.reply()
        verdict = await peer.verdict()
        assert verdict.key == key(2) and list(verdict.tokens) == text[1][1:5]
        assert [[items[0][0], len(items[0][1]), items[0][2]] for items in engine.log] == [
            [0, 9, 0],
            [9, 4, 4],
        ]
        assert peer.load.preempted == 0


async def test_a_lower_priority_value_keeps_its_pages() -> None:
    """Priority first, then arrival; and who asks for nothing loses its pages in the end."""
    engine = ToyEngine(pages=8, page_tokens=4)
    async with target(engine, preempt_idle_ms=60_000) as service:
        peer = service.peer()
        await peer.send(open_target([1] * 9, 8, key(1), priority=5, no_prefix_cache=True))
        await peer.verdict()
        await peer.send(open_target([2] * 9, 8, key(2), priority=0, no_prefix_cache=True))
        await peer.verdict()
        # It takes the pages of the first, whose priority value is higher, and not of the second.
        await peer.send(open_target([3] * 9, 8, key(3), priority=1, no_prefix_cache=True))
        verdict = await peer.verdict()
        assert verdict.key == key(3) and peer.load.preempted == 1
        await peer.send(open_target([4] * 9, 8, key(4), priority=1, no_prefix_cache=True))
        await peer.send(verify(1, 10, at=key(1)))
        await peer.heartbeat()
        assert (peer.load.preempted, peer.load.waiting) == (1, 1)
        await peer.send(target_pb2.CloseSession(key=key(2)))
        assert (await peer.reply()).HasField("closed")
        assert (await peer.verdict()).key == key(4)
        await peer.send(target_pb2.CloseSession(key=key(3)))
        assert (await peer.reply()).HasField("closed")
        last = await peer.verdict()
        assert last.key == key(1) and list(last.tokens) == continuation([1] * 9, 2)[1:]


async def test_a_finished_session_loses_its_pages_before_one_at_work() -> None:
    """Its KV is of no more use; what a session behind would run again is."""
    engine = ToyEngine(pages=9, page_tokens=4)
    async with target(engine, preempt_idle_ms=60_000) as service:
        peer = service.peer()
        await peer.send(open_target([1] * 8, 1, key(1), no_prefix_cache=True))
        assert (await peer.verdict()).finish
        await peer.send(open_target([2] * 8, 20, key(2), no_prefix_cache=True))
        await peer.verdict()
        await peer.send(open_target([3] * 8, 4, key(3), no_prefix_cache=True))
        await peer.verdict()
        assert service.count("preemptions") == 0
        text = continuation([2] * 8, 20)
        for step, have in enumerate((1, 5, 9, 13), start=1):
            await peer.send(verify(step, 8 + have, text[have : have + 3], at=key(2)))
            assert (await peer.verdict()).accepted == 3
        assert service.count("preemptions") == 1
        held = {s.key.session_id for s in service.app.scheduler.sessions if s.table is not None}
        assert held == {2, 3}


async def test_a_finished_session_claims_no_further_page() -> None:
    """Its last token never runs; a new session may have that page, and nobody loses any."""
    engine = ToyEngine(pages=4, page_tokens=4)
    async with target(engine, preempt_idle_ms=60_000) as service:
        peer = service.peer()
        await peer.send(open_target([1] * 8, 1, key(1), no_prefix_cache=True))
        assert (await peer.verdict()).finish
        await peer.send(open_target([2] * 7, 1, key(2), no_prefix_cache=True))
        assert list((await peer.verdict()).tokens) == continuation([2] * 7, 1)
        assert service.count("preemptions") == 0 and peer.load.preempted == 0


async def test_a_draft_takes_no_pages_from_others() -> None:
    """It is cut to what is free; only the anchor is worth a preemption."""
    engine = ToyEngine(pages=7, page_tokens=4)
    async with target(engine, preempt_idle_ms=60_000) as service:
        peer = service.peer()
        await peer.send(open_target([1] * 13, 12, key(1)), open_target([2] * 8, 4, key(2)))
        text = continuation([1] * 13, 12)
        for _ in range(2):
            await peer.verdict()
        assert peer.load.pages_free == 1
        await peer.send(verify(1, 14, text[1:8], at=key(1)))
        assert (await peer.verdict()).accepted == 6
        assert service.count("dropped", cause="draft_clipped") == 1
        assert service.count("preemptions") == 0


async def test_a_silent_session_gives_way() -> None:
    """GP-10, WC-7: nobody waits for ever behind a session that is asked for nothing, and it goes
    on as if nothing had been when it is."""
    engine = ToyEngine(pages=4, page_tokens=4)
    async with target(engine, preempt_idle_ms=20) as service:
        peer = service.peer()
        prompts = [[n] * 12 for n in range(4)]
        text = [continuation(prompt, 4) for prompt in prompts]
        for step in range(3):
            for n, prompt in enumerate(prompts):
                if step:
                    await peer.send(verify(step, 12 + step, at=key(n)))
                else:
                    await peer.send(open_target(prompt, 4, key(n)))
                verdict = await peer.verdict()
                assert verdict.key == key(n) and list(verdict.tokens) == [text[n][step]]
        for n in range(4):
            await peer.send(target_pb2.CloseSession(key=key(n)))
            await peer.reply()
        await service.until_idle()


async def test_a_prompt_loses_its_pages_in_the_middle(tmp_path: Path) -> None:
    """What has run runs again for its KV alone: every row is sent once, in order."""
    address, engine = f"unix:{tmp_path / 'd.sock'}", ToyEngine(pages=30, page_tokens=4)
    first, second = [n % 900 for n in range(90)], [7] * 60
    async with draft_server(address, FakeDraft()) as draft, target(engine) as service:
        peer = service.peer()
        engine.gate.clear()
        await peer.send(
            open_target(first, at=key(1), max_new=20, priority=1, push_to=push_to(address))
        )
        await asyncio.to_thread(engine.entered.wait, 5)
        await peer.send(open_target(second, at=key(2), max_new=20))
        await peer.heartbeat()
        engine.gate.set()
        assert list((await peer.verdict()).tokens) == continuation(second, 1)
        assert service.count("preemptions") == 1 and peer.load.preempted == 1
        await peer.send(target_pb2.CloseSession(key=key(2)))
        assert (await peer.reply()).HasField("closed")
        verdict = await peer.verdict()
        assert list(verdict.tokens) == continuation(first, 1)
        assert (verdict.rows_start, verdict.rows_count, verdict.cached_tokens) == (0, 90, 0)
        chunks = await draft.rows(90)
        assert sum(c.count for c in chunks) == 90
        assert joined(chunks, 0) == (0, expected(0, 90, first))


async def test_the_lease_of_a_session_without_pages() -> None:
    """WC-6: a step that waits for its pages keeps nothing alive."""
    engine = ToyEngine(pages=8, page_tokens=4)
    async with target(engine, preempt_idle_ms=60_000) as service:
        peer = service.peer()
        await peer.send(open_target([1] * 9, 12, key(1), priority=1, lease_ms=300))
        await peer.verdict()
        await peer.send(open_target([2] * 25, 4, key(2)))
        await peer.verdict()
        assert peer.load.preempted == 1
        await peer.send(verify(1, 10, at=key(1)))
        async with asyncio.timeout(5):
            while len(service.app.scheduler.sessions) > 1:  # noqa: ASYNC110  (nobody is told)
                await asyncio.sleep(0.05)
        assert await peer.heartbeat(key(1), key(2)) == [1]


async def test_a_lease_that_ended_in_mid_step_does_not_keep_the_loop_awake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt whose last chunk has no page waits for one, whatever its lease; quietly."""
    engine = ToyEngine(pages=9, page_tokens=4, chunk=8)
    async with target(engine, preempt_idle_ms=60_000, prefill_chunk_tokens=8) as service:
        peer, text = service.peer(), continuation([1] * 9, 16)
        await peer.send(open_target([1] * 9, 16, key(1)))
        await peer.verdict()
        engine.gate.clear()
        engine.entered.clear()
        await peer.send(open_target([2] * 17, 2, key(2), lease_ms=100))
        await asyncio.to_thread(engine.entered.wait, 5)
        await peer.send(verify(1, 10, text[1:8], at=key(1)))
        await peer.heartbeat(key(1))
        engine.gate.set()
        assert (await peer.verdict()).key == key(1)
        scheduler = service.app.scheduler
        waiting = scheduler.sessions.named(Key(1, 2, 1))
        clock = asyncio.get_running_loop().time
        async with asyncio.timeout(5):
            while not waiting.begun or clock() <= waiting.lease_until:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        looks, look = 0, scheduler._expire

        def counted(now: float) -> None:
            nonlocal looks
            looks += 1
            look(now)

        monkeypatch.setattr(scheduler, "_expire", counted)
        await asyncio.sleep(0.3)
        assert waiting.begun and not waiting.running and looks < 10
        await peer.send(target_pb2.CloseSession(key=key(1)))
        assert (await peer.reply()).HasField("closed")
        assert list((await peer.verdict()).tokens) == continuation([2] * 17, 1)


async def test_steps_and_prompts_in_order_of_priority() -> None:
    engine = ToyEngine(chunk=32)
    async with target(engine, prefill_chunk_tokens=32) as service:
        peer = service.peer()
        await peer.send(open_target([9], at=key(9)))
        await peer.verdict()
        engine.gate.clear()
        engine.entered.clear()
        await peer.send(verify(1, 2, at=key(9)))
        await asyncio.to_thread(engine.entered.wait, 5)
        priorities = {1: 3, 2: -2, 3: 0, 4: -2}
        for n, priority in priorities.items():
            prompt = [n, *range(40)]
            await peer.send(open_target(prompt, at=key(n), priority=priority))
        await peer.heartbeat()
        engine.gate.set()
        await peer.verdict()
        order = [(await peer.verdict()).key.session_id for _ in priorities]
        assert order == [2, 4, 3, 1]


async def test_a_long_prompt_does_not_stall_decoders() -> None:
    """While 512 prompt tokens run, 32 a step, every step also carries each decoder's block."""
    engine = ToyEngine(pages=100, max_length=1024)
    async with target(engine, prefill_chunk_tokens=32) as service:
        peer = service.peer()
        decoders = [key(n) for n in range(1, 5)]
        await peer.send(*(open_target([5], 1000, k, free_run=900) for k in decoders))
        for _ in decoders:
            await peer.verdict()
        await peer.send(open_target([n % 900 for n in range(512)], at=key(9)))
        while (await peer.verdict()).key != key(9):
            pass
        prompt = [items for items in engine.log if any(len(ids) > 1 for _, ids, _ in items)]
        assert len(prompt) == 16
        assert all(len(items) == 5 for items in prompt)
        await peer.send(*(target_pb2.CloseSession(key=k) for k in [*decoders, key(9)]))


async def test_sixty_four_sessions_in_one_frame_are_one_step() -> None:
    engine = ToyEngine(pages=200)
    async with target(engine, prefill_chunk_tokens=256) as service:
        peer = service.peer()
        keys = [key(n) for n in range(64)]
        await peer.send(*(open_target([n, 1, 2], at=k) for n, k in enumerate(keys)))
        for _ in keys:
            await peer.verdict()
        engine.log.clear()
        truth = [continuation([n, 1, 2], 5) for n in range(64)]
        await peer.send(*(verify(1, 4, t[1:4], at=k) for t, k in zip(truth, keys, strict=True)))
        got = [await peer.verdict() for _ in keys]
        assert [len(items) for items in engine.log] == [64]
        assert all(list(v.tokens) == truth[v.key.session_id][1:5] for v in got)


async def test_toggling_k_between_rounds() -> None:
    """NU-12: rounds with and without drafts give the ids of a run without any."""
    async with target(ToyEngine(rows_independent=False)) as service:
        for n, pattern in enumerate(([0], [3], [0, 3], [7, 0, 0, 2]), start=1):
            peer, got, truth = service.peer(), [], continuation([4, 5], 24)
            await peer.send(open_target([4, 5], 24, key(n)))
            verdict = await peer.verdict()
            got += verdict.tokens
            while not verdict.finish:
                k = pattern[verdict.step_id % len(pattern)]
                draft = truth[len(got) : len(got) + k]
                await peer.send(verify(verdict.step_id + 1, verdict.new_len, draft, at=key(n)))
                verdict = await peer.verdict()
                got += verdict.tokens
            assert got == truth


async def _churn(service: Target, number: int, peer: Peer, dice: random.Random) -> None:
    """Opens, verifies a little, forks, goes back, leaves: mostly without a word."""
    at, prompt = key(number), [dice.randrange(3)] * dice.randrange(1, 40)
    fields: dict[str, Any] = {"priority": dice.randrange(3)}
    if dice.random() < 0.3:
        fields["fork_of"] = key(dice.randrange(max(1, number - 3), number + 1))
    await peer.send(open_target(prompt, dice.randrange(1, 30), at, lease_ms=5_000, **fields))
    if dice.random() < 0.3:
        await peer.send(target_pb2.CloseSession(key=at))
        while not (await peer.reply(20)).HasField("closed"):
            pass
        return
    reply = await peer.reply(20)
    truth = continuation(prompt, 64)
    for step in range(1, dice.randrange(1, 6)):
        if not reply.HasField("verdict") or reply.verdict.finish:
            break
        have = reply.verdict.new_len - len(prompt)
        if dice.random() < 0.1 and have > 1:
            have -= 1
        draft = truth[have : have + dice.randrange(5)]
        await peer.send(verify(step, len(prompt) + have, draft, at=at))
        reply = await peer.reply(20)
        assert list(reply.verdict.tokens) == truth[have:][: len(reply.verdict.tokens)]
    await peer.send(target_pb2.CloseSession(key=at))
    while not (await peer.reply(20)).HasField("closed"):
        pass


async def churn(sessions: int, lanes: int = 12) -> None:
    engine = ToyEngine(pages=40, page_tokens=4, max_length=128)
    async with target(engine, preempt_idle_ms=30, max_waiting=sessions) as service:
        numbers = iter(range(1, sessions + 1))

        async def lane() -> None:
            peer = service.peer()
            for number in numbers:
                await _churn(service, number, peer, random.Random(number))
                engine.log.clear()
            peer.call.cancel()

        await asyncio.gather(*(lane() for _ in range(lanes)))
        await service.until_idle(10)
        assert service.count("preemptions") > 0 and service.count("prompt_tokens", source="cache")
        # Nothing is kept beside the pool: the next session that fits is taken at once.
        peer = service.peer()
        await peer.send(open_target([8] * 100, 20, key(sessions + 1)))
        assert list((await peer.verdict()).tokens) == continuation([8] * 100, 1)


async def test_pages_are_free_after_churn() -> None:
    """WC-6, WC-8, GP-10: hundreds of sessions that share, fork, go back, are preempted, vanish."""
    await churn(300)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_pages_are_free_after_ten_thousand_sessions() -> None:
    await churn(10_000)
