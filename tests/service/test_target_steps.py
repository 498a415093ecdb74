"""Steps of a target session over gRPC: order, repeats, truncation, limits, stops, drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from engine.api import Item, ItemResult, nothing
from specwire.v1 import common_pb2
from tests.service.target_harness import open_target, target, verify
from tests.service.toy_engine import EOS, VOCAB, ToyEngine, continuation

PROMPT = [5, 6, 7]
TEXT = continuation(PROMPT, 40)


async def test_open_and_verify() -> None:
    async with target() as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, max_new=20, report_margins=True))
        first = await peer.verdict()
        assert (first.step_id, first.base_len, first.new_len, first.accepted) == (0, 3, 4, 0)
        assert list(first.tokens) == TEXT[:1] and len(first.margins) == 1
        wrong = (TEXT[3] + 1) % VOCAB
        await peer.send(verify(1, 4, [TEXT[1], TEXT[2], wrong]))
        second = await peer.verdict()
        assert (second.accepted, second.base_len, second.new_len) == (2, 4, 7)
        assert list(second.tokens) == TEXT[1:4] and second.width == 4
        assert second.timings.compute_ns > 0


class _Capturing(ToyEngine):
    """Its second step meets a new shape, which takes 60 ms once."""

    def step(
        self, items: Sequence[Item], launched: Callable[[], None] = nothing
    ) -> list[ItemResult]:
        if len(self.log) == 1:
            time.sleep(0.06)
            self.spent_once_ns += 60_000_000
        return super().step(items, launched)


async def test_what_is_spent_once_is_told_apart() -> None:
    async with target(_Capturing()) as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT))
        assert (await peer.verdict()).timings.once_ns == 0
        await peer.send(verify(1, 4, TEXT[1:2]))
        captured = (await peer.verdict()).timings
        assert captured.once_ns == 60_000_000 and 0 < captured.compute_ns < 50_000_000
        await peer.send(verify(2, 6))
        assert (await peer.verdict()).timings.once_ns == 0


async def test_repeated_and_stale_steps() -> None:
    """Equal: the kept verdict, byte for byte. Lower: dropped. Neither runs the engine."""
    async with target() as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT))
        opened = await peer.verdict()
        await peer.send(open_target(PROMPT))
        assert await peer.verdict() == opened
        await peer.send(verify(3, 4, TEXT[1:3]))
        third = await peer.verdict()
        steps = len(service.engine.log)
        # A late repeat names the old length; it must not truncate.
        await peer.send(verify(2, 4, [1]), verify(3, 4, [9, 9]), open_target(PROMPT))
        assert await peer.verdict() == third
        assert await peer.heartbeat() == []
        assert len(service.engine.log) == steps
        assert service.count("dropped", cause="stale_step") == 2
        await peer.send(verify(4, 7))
        assert list((await peer.verdict()).tokens) == TEXT[4 - 0 : 5]


async def test_repeat_joins_the_running_step() -> None:
    async with target() as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT))
        await peer.verdict()
        service.engine.gate.clear()
        await peer.send(verify(1, 4, TEXT[1:3]), verify(1, 4, TEXT[1:3]))
        await peer.heartbeat()
        service.engine.gate.set()
        assert (await peer.verdict()).new_len == 7
        await peer.heartbeat()
        assert len(service.engine.log) == 2


async def test_only_a_higher_step_truncates() -> None:
    async with target() as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT))
        await peer.verdict()
        await peer.send(verify(1, 4, TEXT[1:6]))
        assert (await peer.verdict()).new_len == 10
        await peer.send(verify(2, 5, [TEXT[2]]))
        again = await peer.verdict()
        assert (again.base_len, again.new_len, list(again.tokens)) == (5, 7, TEXT[2:4])
        await peer.send(verify(3, 2))  # into the prompt: the next token is drawn, not copied
        short = await peer.verdict()
        assert (short.new_len, list(short.tokens)) == (3, continuation(PROMPT[:2], 1))


async def test_a_longer_base_is_answered_with_the_length_known() -> None:
    async with target() as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT))
        await peer.verdict()
        await peer.send(verify(1, 9, [1]))
        refused = await peer.refused()
        assert (refused.error.reason, refused.have_len, refused.step_id) == ("NEED_TOKENS", 4, 1)
        await peer.send(verify(2, 4))
        assert (await peer.verdict()).new_len == 5


async def test_a_step_that_comes_too_early_waits() -> None:
    """One step of a session at a time: what arrives meanwhile runs next, the newest of several."""
    async with target() as service:
        peer = service.peer()
        service.engine.gate.clear()
        await peer.send(open_target(PROMPT), verify(1, 4, [TEXT[1]]), verify(2, 4, TEXT[1:3]))
        await peer.heartbeat()
        service.engine.gate.set()
        assert (await peer.verdict()).step_id == 0
        second = await peer.verdict()
        assert (second.step_id, second.accepted) == (2, 2)
        assert service.count("dropped", cause="superseded_step") == 1


@pytest.mark.parametrize("limit", range(1, 10))
async def test_token_limit_is_exact(limit: int) -> None:
    """WC-20: four draft tokens, all right, and still exactly the tokens asked for."""
    async with target() as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, max_new=limit))
        verdict = await peer.verdict()
        got, step = list(verdict.tokens), 0
        while not verdict.finish:
            step += 1
            await peer.send(verify(step, verdict.new_len, TEXT[len(got) : len(got) + 4]))
            verdict = await peer.verdict()
            got += verdict.tokens
            assert verdict.accepted <= len(verdict.tokens)
        assert got == TEXT[:limit] and verdict.finish == common_pb2.FINISH_REASON_LENGTH
        assert service.engine.stats().tables == 1


@pytest.mark.parametrize(("ignore_eos", "kept"), [(False, 3), (True, 6)])
async def test_stop_inside_an_accepted_block(ignore_eos: bool, kept: int) -> None:
    """WC-19: [a, b, STOP, c, d] are all accepted by the engine; the text ends at STOP."""
    engine = ToyEngine()
    engine.forced[6] = EOS
    text = [*TEXT[:3], EOS, *continuation([*PROMPT, *TEXT[:3], EOS], 3)]
    async with target(engine) as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, ignore_eos=ignore_eos))
        await peer.verdict()
        await peer.send(verify(1, 4, text[1:6]))
        verdict = await peer.verdict()
        assert list(verdict.tokens) == text[1 : 1 + kept]
        assert verdict.new_len == 4 + kept
        assert verdict.accepted == min(kept, 5)
        stopped = verdict.finish == common_pb2.FINISH_REASON_STOP_TOKEN
        assert stopped is not ignore_eos


async def test_stop_token_ids_and_the_end_of_a_session() -> None:
    async with target() as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, stop_token_ids=[TEXT[2]]))
        await peer.verdict()
        await peer.send(verify(1, 4, TEXT[1:6]))
        verdict = await peer.verdict()
        assert (list(verdict.tokens), verdict.accepted) == (TEXT[1:3], 2)
        await peer.send(verify(2, 6))
        refused = await peer.refused()
        assert refused.error.metadata["field"] == "base_len" and refused.have_len == 6
        await peer.send(verify(3, 5))  # rolled back behind the stop: it goes on
        assert (await peer.verdict()).new_len == 6


async def test_bad_draft_ids_cost_speed_only() -> None:
    """DF-36, WC-17, WC-37: out of range, too many; never an error, never in the embedding."""
    async with target(max_draft_tokens=4) as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT))
        await peer.verdict()
        await peer.send(verify(1, 4, [TEXT[1], VOCAB, TEXT[3]]))
        assert list((await peer.verdict()).tokens) == TEXT[1:3]
        await peer.send(verify(2, 6, [2**32 - 1] * 3))
        assert list((await peer.verdict()).tokens) == TEXT[3:4]
        await peer.send(verify(3, 7, TEXT[4:14]))
        assert (await peer.verdict()).accepted == 4
        assert service.count("dropped", cause="draft_id_range") == 5
        assert service.count("dropped", cause="draft_too_long") == 6


async def test_exact_blocks_are_clipped_fast_ones_are_not() -> None:
    for exactness, accepted in ((common_pb2.EXACTNESS_EXACT, 3), (common_pb2.EXACTNESS_FAST, 6)):
        async with target(ToyEngine(block=4)) as service:
            peer = service.peer()
            await peer.send(open_target(PROMPT, exactness=exactness))
            await peer.verdict()
            await peer.send(verify(1, 4, TEXT[1:7]))
            verdict = await peer.verdict()
            assert (verdict.accepted, verdict.width) == (accepted, accepted + 1)


async def test_model_length_ends_a_session() -> None:
    async with target(ToyEngine(max_length=16)) as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, max_new=500))
        await peer.verdict()
        await peer.send(verify(1, 4, TEXT[1:8]))
        await peer.verdict()
        await peer.send(verify(2, 12, TEXT[9:16]))
        verdict = await peer.verdict()
        assert (verdict.new_len, verdict.finish) == (16, common_pb2.FINISH_REASON_LENGTH)
