"""What is said of a step while the next one runs: in time, in order, and by nobody who has gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from engine.api import Item, ItemResult, nothing
from specwire.errors import Reason
from specwire.v1 import target_pb2
from tests.service.target_harness import (
    FakeDraft,
    draft_server,
    key,
    open_target,
    push_to,
    target,
    verify,
)
from tests.service.toy_engine import ToyEngine, continuation

SESSIONS = 12  # more than are told at once
PROMPT = [5, 6, 7]


class _Held(ToyEngine):
    """Its steps from the second on wait, having told so (or not)."""

    def __init__(self, tells: bool = True) -> None:
        super().__init__(pages=256)
        self.tells, self.hold, self.inside = tells, threading.Event(), threading.Event()

    def step(
        self, items: Sequence[Item], launched: Callable[[], None] = nothing
    ) -> list[ItemResult]:
        if self.log:
            if self.tells:
                launched()
            self.inside.set()
            self.hold.wait(10)
        return super().step(items)


def opens() -> list[target_pb2.OpenTarget]:
    return [open_target(PROMPT, at=key(n), free_run=3) for n in range(1, SESSIONS + 1)]


async def test_verdicts_leave_while_the_next_step_runs() -> None:
    engine = _Held()
    async with target(engine) as service:
        peer = service.peer()
        await peer.send(*opens())
        first = [await peer.verdict() for _ in range(SESSIONS)]
        assert len(engine.log) == 1
        assert [v.key.session_id for v in first] == list(range(1, SESSIONS + 1))
        # The kept answer, byte for byte, in the middle of the next step.
        await peer.send(open_target(PROMPT, at=key(3), free_run=3))
        assert await peer.verdict() == first[2]
        await peer.send(target_pb2.CloseSession(key=key(5)))
        assert (await peer.reply()).HasField("closed")
        engine.hold.set()
        rest = [await peer.verdict() for _ in range(3 * (SESSIONS - 1))]
        assert all(v.key.session_id != 5 for v in rest)
        text = continuation(PROMPT, 4)
        for n in {*range(1, SESSIONS + 1)} - {5}:
            own = [v for v in (*first, *rest) if v.key.session_id == n]
            assert [t for v in own for t in v.tokens] == text
            assert [v.step_id for v in own] == [0, 1, 2, 3]


async def test_an_engine_that_does_not_tell_is_not_waited_for() -> None:
    engine = _Held(tells=False)
    async with target(engine) as service:
        peer = service.peer()
        await peer.send(*opens())
        await asyncio.to_thread(engine.inside.wait, 10)
        found = [await peer.verdict() for _ in range(SESSIONS)]
        assert not engine.hold.is_set()
        engine.hold.set()
        found += [await peer.verdict() for _ in range(3 * SESSIONS)]
        assert [v.step_id for v in found] == [n for n in range(4) for _ in range(SESSIONS)]


async def test_a_refusal_comes_behind_the_verdicts_before_it() -> None:
    engine = _Held(tells=False)
    async with target(engine) as service:
        peer = service.peer()
        await peer.send(*opens())
        await asyncio.to_thread(engine.inside.wait, 10)
        await peer.send(verify(9, 9, at=key(99)))
        assert [(await peer.verdict()).step_id for _ in range(SESSIONS)] == [0] * SESSIONS
        assert (await peer.refused()).error.reason == Reason.SESSION_UNKNOWN
        engine.hold.set()


async def test_a_refusal_of_the_next_step_comes_behind_the_verdict() -> None:
    engine = ToyEngine()
    async with target(engine) as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT))
        await peer.verdict()
        engine.entered.clear()
        engine.gate.clear()
        await peer.send(verify(1, 4), verify(2, 40))
        await asyncio.to_thread(engine.entered.wait, 10)
        engine.gate.set()
        assert (await peer.verdict()).step_id == 1
        assert (await peer.refused()).step_id == 2


async def test_rows_of_a_step_that_is_rolled_back_leave_those_before_it(tmp_path: Path) -> None:
    address, engine = f"unix:{tmp_path / 'd.sock'}", ToyEngine()
    async with draft_server(address, FakeDraft()) as draft, target(engine) as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, push_to=push_to(address)))
        await peer.verdict()
        text = continuation(PROMPT, 4)
        await peer.send(verify(1, 4, text[1:3]))
        assert (await peer.verdict()).new_len == 7
        engine.entered.clear()
        engine.gate.clear()
        await peer.send(verify(2, 7), verify(3, 5))
        await asyncio.to_thread(engine.entered.wait, 10)
        engine.gate.set()
        assert [(await peer.verdict()).step_id for _ in range(2)] == [2, 3]
        await draft.rows(3 + 3 + 1 + 1)
        draft.chunks.clear()
        await peer.send(target_pb2.ExportRows(key=key(), **{"from": 0}))
        chunks = await draft.rows(5)
        assert (chunks[0].start, sum(chunk.count for chunk in chunks)) == (0, 5)


async def test_a_lease_that_ends_with_a_step_takes_no_verdict_along() -> None:
    engine = ToyEngine(step_s=0.15)
    async with target(engine) as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, lease_ms=400, free_run=8))
        found = []
        with suppress(TimeoutError):
            while True:
                found.append((await peer.reply(1.0)).verdict.step_id)
        assert found == list(range(len(engine.log)))
