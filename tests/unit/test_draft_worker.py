"""Which jobs the draft's thread takes together, and which the event loop carries out itself."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from draft_svc import worker as module
from draft_svc.jobs import Computed, Handle, Job, ProposeJob, UpdateJob
from draft_svc.methods.base import Draft
from draft_svc.worker import Worker


def method(device: str, **changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "info": SimpleNamespace(device=device),
        "once_ns": 0,
        "warm_up": lambda stopped: None,
        "work": lambda: False,
        "stats": lambda: SimpleNamespace(free=0, total=0, tables=0),
        "update": lambda *_: None,
        "close": lambda _: None,
    }
    return SimpleNamespace(**fields | changes)


async def test_what_one_message_asks_for_is_one_tick() -> None:
    """Rows, tokens and the question: the thread must not begin, and catch up, with the rows."""
    ticks: list[list[Job]] = []
    begun = threading.Event()

    class Noted(Worker):
        def _tick(self, jobs: list[Job]) -> list[Any]:
            ticks.append(jobs)
            begun.set()
            return []

    worker = Noted(lambda: cast(Any, {"toy": method("cpu")}))
    await worker.start()
    try:
        handle = Handle("toy")
        rows = UpdateJob(handle, 3, (), ())
        worker.put(rows)
        assert not begun.wait(0.05), "the thread began in the middle of a message"
        tokens, question = UpdateJob(handle, 3, (1,), ()), ProposeJob(handle, 2, 1e9, print)
        worker.put(tokens)
        worker.put(question)
        await asyncio.to_thread(begun.wait, 5)
        worker.put(rows)
    finally:
        await worker.stop()
    assert ticks == [[rows, tokens, question], [rows]]


class Rounds:
    """Rounds of a worker whose method notes the thread that it was called on. `pause_s` of each
    proposal, by number."""

    def __init__(self, device: str, pauses: dict[int, float] | None = None) -> None:
        self.threads: list[bool] = []  # on the loop's?
        self.order: list[str] = []
        self._pauses = pauses or {}
        self._handles: dict[str, Handle] = {}
        # Each message is its own.
        self.hurried = False
        self.worked = threading.Event()
        toy = method(device, propose=self._propose, work=self._work)
        self.worker = Worker(lambda: cast(Any, {"toy": toy}))

    def _propose(self, requests: Sequence[Any]) -> list[Draft]:
        time.sleep(self._pauses.get(len(self.threads), 0))
        self.threads.append(threading.current_thread() is threading.main_thread())
        return [Draft() for _ in requests]

    def _work(self) -> bool:
        self.worked.set()
        return False

    async def ask(self, *names: str) -> None:
        """Questions of several sessions in one message; returns when all are answered."""
        answered = [asyncio.get_running_loop().create_future() for _ in names]

        def done(name: str, future: asyncio.Future[None]) -> Callable[[Computed], None]:
            return lambda _: (self.order.append(name), future.set_result(None))[1]

        for name, future in zip(names, answered, strict=True):
            handle = self._handles.setdefault(name, Handle("toy", object()))
            self.worker.put(UpdateJob(handle, 3, (1,), ()))
            self.worker.put(ProposeJob(handle, 2, 1e9, done(name, future)))
        if self.hurried:
            self.worker.hand_over()
        await asyncio.wait_for(asyncio.gather(*answered), 5)


async def test_one_session_s_round_of_a_gpu_is_the_loop_s() -> None:
    rounds = Rounds("cuda:0 test")
    await rounds.worker.start()
    try:
        await rounds.ask("a")
        await asyncio.sleep(0.02)
        rounds.worked.clear()
        await rounds.ask("a")
        assert rounds.threads == [False, True], "who asks again is expected to go on"
        assert await asyncio.to_thread(rounds.worked.wait, 5), "the thread looks after the rest"
        await asyncio.sleep(0.05)
        await rounds.ask("b", "c")
        assert rounds.threads == [False, True, False], "who asks together is computed on the thread"
    finally:
        await rounds.worker.stop()


async def test_the_loop_polls_behind_its_own_rounds_alone() -> None:
    """Else it would take the interpreter from the thread."""
    rounds, said = Rounds("cuda:0 test"), list[str]()
    poll = SimpleNamespace(begin=lambda: said.append("begin"), end=lambda: said.append("end"))
    rounds.worker._poll = cast(Any, poll)
    await rounds.worker.start()
    try:
        await rounds.ask("a")
        await asyncio.sleep(0.02)
        await rounds.ask("a")
        await rounds.ask("b", "c")
    finally:
        await rounds.worker.stop()
    assert rounds.threads == [False, True, False] and said == ["end", "begin", "end"]


async def test_on_a_cpu_the_loop_computes_nothing() -> None:
    rounds = Rounds("cpu")
    await rounds.worker.start()
    try:
        await rounds.ask("a")
        await rounds.ask("b")
    finally:
        await rounds.worker.stop()
    assert rounds.threads == [False, False]


async def test_a_long_proposal_goes_back_to_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until one is short again: the loop serves nobody else meanwhile."""
    monkeypatch.setattr(module, "_BRIEF_S", 0.1)
    rounds = Rounds("cuda:0 test", {1: 0.15, 2: 0.15})
    await rounds.worker.start()
    try:
        for _ in range(5):
            await rounds.ask("a")
            await asyncio.sleep(0.02)
    finally:
        await rounds.worker.stop()
    assert rounds.threads == [False, True, False, False, True]


async def test_what_the_thread_has_begun_comes_first() -> None:
    rounds = Rounds("cuda:0 test", {0: 0.1})
    await rounds.worker.start()
    try:
        first = asyncio.create_task(rounds.ask("a", "b"))
        await asyncio.sleep(0.02)
        await rounds.ask("c")
        await first
    finally:
        await rounds.worker.stop()
    assert rounds.order == ["a", "b", "c"] and rounds.threads == [False, False]


async def test_what_proposes_nothing_says_nothing_of_how_long_that_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows alone are soon taken, behind long proposals too."""
    monkeypatch.setattr(module, "_BRIEF_S", 0.1)
    rounds = Rounds("cuda:0 test", {1: 0.15, 2: 0.15})
    await rounds.worker.start()
    try:
        for _ in range(2):
            await rounds.ask("a")
            await asyncio.sleep(0.02)
        rounds.worker.put(UpdateJob(Handle("toy", object()), 3, (1,), ()))
        await asyncio.sleep(0.05)
        await rounds.ask("a")
    finally:
        await rounds.worker.stop()
    assert rounds.threads == [False, True, False]


async def test_sessions_that_ask_one_by_one_are_computed_together() -> None:
    """Each in a message of its own, as targets of their own send them: meanwhile the loop would
    compute the first alone, and then the next."""
    rounds = Rounds("cuda:0 test", dict.fromkeys(range(20), 0.002))
    rounds.hurried = True
    await rounds.worker.start()
    try:
        for _ in range(2):
            await asyncio.gather(*(rounds.ask(name) for name in "abcdef"))
            await asyncio.sleep(0.02)
    finally:
        await rounds.worker.stop()
    assert len(rounds.order) == 12 and len(rounds.threads) <= 6
