"""Where a target's steps run: behind an answer to its only session on the event loop, where the
engine lets it; else on the engine's thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.api import Item, ItemResult, nothing
from specwire.v1 import target_pb2
from target_svc import progress
from tests.service.asks_harness import TEXT, asking, right, run
from tests.service.target_harness import answer, key, open_target, verify
from tests.service.toy_engine import ToyEngine


class Placed(ToyEngine):
    """Notes which of its steps ran on the event loop."""

    def __init__(self, any_thread: bool = True, step_s: float = 0.0) -> None:
        super().__init__(any_thread=any_thread, step_s=step_s)
        self.here: list[bool] = []

    def step(
        self, items: Sequence[Item], launched: Callable[[], None] = nothing
    ) -> list[ItemResult]:
        self.here.append(threading.current_thread() is threading.main_thread())
        return super().step(items, launched)


async def test_the_only_sessions_rounds_run_on_the_event_loop() -> None:
    engine = Placed()
    async with asking(right, engine) as made:
        await made.peer.send(run(1, 4, rounds=8))
        await made.verdicts(9)
        assert made.tokens() == TEXT[1:28]
    # The prompt's step and the one that was asked for had no answer before them.
    assert engine.here == [False, False] + [True] * 8


@pytest.mark.parametrize("engine", [Placed(any_thread=False), Placed(step_s=0.02)])
async def test_steps_of_a_cpu_and_long_ones_run_on_the_thread(engine: Placed) -> None:
    """Meanwhile nobody would read what comes."""
    async with asking(right, engine) as made:
        await made.peer.send(run(1, 4, rounds=4))
        await made.verdicts(5)
        assert made.tokens() == TEXT[1:16]
    assert not any(engine.here)


async def test_steps_of_several_run_on_the_thread() -> None:
    engine = Placed()
    async with asking(right, engine) as made:
        other = made.service.peer()
        await other.send(open_target([9, 9], 4, key(2)))
        await other.verdict()
        await made.peer.send(run(1, 4, rounds=4))
        await made.verdicts(5)
        assert not any(engine.here)
        await other.send(target_pb2.CloseSession(key=key(2)))
        assert (await other.reply()).HasField("closed")
        await made.peer.send(run(6, 19, rounds=4))
        await made.verdicts(5)
        assert made.tokens() == TEXT[1:31]
    assert engine.here[-4:] == [True] * 4


async def test_a_verdict_leaves_while_the_step_behind_it_runs_on_the_loop() -> None:
    """The device works meanwhile; who reads the text need not wait for it."""
    engine = Placed()
    async with asking(right, engine) as made:
        written: list[int] = []
        link = next(iter(made.service.app.scheduler.sessions)).link  # type: ignore[union-attr]
        hurry = link.hurry
        link.hurry = lambda: (written.append(len(engine.here)), hurry())  # type: ignore[method-assign]
        await made.peer.send(run(1, 4, rounds=3))
        await made.verdicts(4)
        # Verdict n leaves within step n + 1, the last with its answer.
        assert written == [3, 4, 5, 5]


async def test_a_failed_step_on_the_loop_ends_its_session_alone() -> None:
    engine = Placed()
    async with asking(engine=engine) as made:
        first = await made.held(run(1, 4, rounds=5))
        engine.fail_steps = 1
        made.draft.say(*right(first))
        await made.verdicts(1)
        refused = await made.peer.refused()
        assert (refused.step_id, refused.error.reason) == (2, "INTERNAL") and engine.here[-1]
        await made.peer.send(open_target([9, 9], 4, key(2)))
        assert (await made.peer.verdict()).tokens
        await made.peer.send(verify(1, 3, [], key(2)))
        assert (await made.peer.verdict()).step_id == 1


async def test_an_answer_too_late_for_its_run_begins_no_step() -> None:
    """The deadline of what was asked has passed while the draft worked."""
    engine = Placed()
    async with asking(engine=engine) as made:
        first = await made.held(run(1, 4, rounds=5, deadline_ms=80))
        assert (await made.verdicts(1))[0].proposal.reason == "late"
        refused = await made.peer.refused()
        assert (refused.step_id, refused.error.reason) == (2, "DEADLINE")
        made.draft.say(answer(first, TEXT[4:6]))
        assert await made.peer.heartbeat(key()) == []
        assert not any(engine.here)


class Captures(Placed):
    """Its fourth step takes long, for what need not be done again."""

    def step(
        self, items: Sequence[Item], launched: Callable[[], None] = nothing
    ) -> list[ItemResult]:
        if len(self.here) == 3:
            time.sleep(0.5)
            self.spent_once_ns += 500_000_000
        return super().step(items, launched)


async def test_no_lease_ends_while_the_loop_hears_nobody() -> None:
    """Heartbeats that came meanwhile are read behind the step."""
    engine = Captures()
    async with asking(right, engine, lease_ms=400) as made:
        await made.peer.send(run(1, 4, rounds=6))
        await made.verdicts(7)
        assert made.tokens() == TEXT[1:22] and engine.here[2:] == [True] * 6
        assert made.service.count("dropped", cause="lease_expired") == 0


async def test_a_bug_behind_a_step_ends_the_service_wherever_it_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not the stream that the answer came on, with a session that nobody steps any more."""
    counted, whole = [0], progress.question

    def broken(*given: Any) -> Any:
        counted[0] += 1
        if counted[0] == 3:
            raise RuntimeError("a bug")
        return whole(*given)

    monkeypatch.setattr(progress, "question", broken)
    engine = Placed()
    with pytest.raises(RuntimeError, match="a bug"):
        async with asking(right, engine) as made:
            await made.peer.send(run(1, 4, rounds=4))
            await asyncio.wait_for(made.service.app.wait(asyncio.Event()), 5)
    assert engine.here[-1]


async def test_nothing_runs_once_the_step_loop_has_ended() -> None:
    engine = Placed()
    async with asking(engine=engine) as made:
        first = await made.held(run(1, 4, rounds=8))
        loop_task = made.service.app._loop_task
        assert loop_task is not None
        loop_task.cancel()
        await asyncio.wait([loop_task])
        steps = len(engine.here)
        made.draft.say(*right(first))
        await asyncio.sleep(0.1)
        assert len(engine.here) == steps
