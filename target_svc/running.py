"""A batch through the engine and back: between two steps there is only what the next one needs.

What is to be said of the last step is written while the engine works on the next one: once it has
launched it, since until then both would need the interpreter, but soon in any case.

A GPU computes for the event loop as well as for the engine's thread. So where one session alone
asks a draft service behind a brief step, the step runs on the loop: the ways to the thread and back
would be a part of each round.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from engine.api import Drafter, Engine, Item, ItemResult, nothing
from specwire.errors import Reason, SpecwireError, internal_error
from specwire.poll import BusyPoll
from target_svc.answers import Answers
from target_svc.asking import asks_service
from target_svc.engine_thread import EngineThread
from target_svc.metrics import Metrics
from target_svc.progress import Progress
from target_svc.proposing import Made, propose, wish_of
from target_svc.sessions import Session

log = logging.getLogger(__name__)

# After so many failed steps in a row the engine is given up.
_FAILURES_ALLOWED = 3
# A launch takes less; where it does not (kernels are compiled, a graph is captured) nobody waits.
_LAUNCH_S = 0.002
# Behind a step that took longer the next one is not run on the event loop: meanwhile nobody reads
# what comes, heartbeats and closes among it.
_BRIEF_S = 0.01

Batch = Sequence[tuple[Session, Item]]


class Ran(NamedTuple):
    """What came of a batch: of each item its result, and the proposal that was asked for with it;
    the seconds of the step, and the nanoseconds beside them that it spent on what need not be done
    again. Those of the drafter stand in its proposals."""

    results: Sequence[ItemResult]
    proposals: Sequence[Made | None]
    seconds: float
    once_ns: int


class Running:
    """Runs steps; its methods are called on the event loop."""

    def __init__(
        self,
        engine: Engine,
        thread: EngineThread,
        drafter: Drafter | None,
        progress: Progress,
        answers: Answers,
        metrics: Metrics,
        on_engine_down: Callable[[], None],
        poll: BusyPoll,
    ) -> None:
        self._engine, self._thread, self._drafter = engine, thread, drafter
        self._progress, self._answers, self._metrics = progress, answers, metrics
        self._on_engine_down, self._poll = on_engine_down, poll
        self._failures = 0
        self._in_place, self._brief = engine.admit_thread(), False
        answers.on_lost = self._lost

    @property
    def engine_down(self) -> bool:
        return self._failures >= _FAILURES_ALLOWED

    async def step(self, batch: Batch, meanwhile: Callable[[], None]) -> None:
        """Runs a step and commits what came of it; calls `meanwhile` while the engine works."""
        loop = asyncio.get_running_loop()
        self._poll.end()
        launched: asyncio.Future[None] = loop.create_future()
        tell = _teller(loop, launched) if len(self._answers) else nothing
        work = self._thread.call(self._run, batch, tell)
        if len(self._answers):
            try:
                await _either(loop, launched, work)
            finally:
                self._answers.flush()
        with self._answers.at_once():
            meanwhile()
            try:
                ran = await work
            except Exception as error:  # the engine raises for bugs only: the service outlives them
                self._failed(batch, error)
                return
        self._ended(batch, ran)

    def may_step_here(self, ready: Iterable[Session]) -> bool:
        """Whether what is ready may run on the event loop: a block of the only session, one that
        asks a draft service."""
        if not (self._in_place and self._brief and self._progress.alone):
            return False
        return all(s.step is not None and not s.filling and asks_service(s, s.step) for s in ready)

    def step_here(self, batch: Batch) -> None:
        """`step` on the event loop. What is to be said leaves while the device works."""
        began = time.monotonic()
        try:
            ran = self._run(batch, self._answers.flush)
        except Exception as error:
            self._failed(batch, error)
            return
        blocked_s = time.monotonic() - began
        for session, _ in batch:  # who renews leases was not heard meanwhile
            session.lease_until += blocked_s
        self._ended(batch, ran)
        self._poll.begin()  # the question is on its way

    def _run(self, batch: Batch, launched: Callable[[], None]) -> Ran:
        """The step, then the proposals that were asked for with it, on any thread."""
        items = [item for _, item in batch]
        wishes = [wish_of(session) if item.draws else None for session, item in batch]
        engine, drafter = self._engine, self._drafter
        began, once_before = time.perf_counter(), engine.once_ns
        results = engine.step(items, launched)
        once_ns = engine.once_ns - once_before
        computed = time.perf_counter() - began - once_ns / 1e9
        proposals: list[Made | None] = [None] * len(items)
        if drafter is not None and any(wish is not None for wish in wishes):
            proposals = propose(drafter, wishes, results)
        return Ran(results, proposals, computed, once_ns)

    def _ended(self, batch: Batch, ran: Ran) -> None:
        self._failures, now = 0, asyncio.get_running_loop().time()
        self._brief = ran.seconds < _BRIEF_S
        for (session, item), result, made in zip(batch, ran.results, ran.proposals, strict=True):
            session.running = False
            step = session.step
            if session.closed or step is None:
                continue
            step.compute_s += ran.seconds
            step.once_ns += ran.once_ns
            step.width = result.width
            self._progress.end_item(session, item, result, now, made)
        self._answers.stepped(len(batch), ran.seconds)
        if not self._progress.ready:  # there is no step to be launched first
            self._answers.flush()

    def _failed(self, batch: Batch, error: Exception) -> None:
        """The sessions of a failed step end: what their pages hold is unknown."""
        failure = self._failure(error)
        for session, _ in batch:
            session.running = False
            if not session.closed and session.step is not None:
                self._progress.refuse(session, session.step.step_id, failure)
                self._progress.remove(session)
        if self.engine_down:
            self._on_engine_down()

    def _lost(self, session: Session, step_id: int, error: Exception) -> None:
        """Rows of a step never came from the device; another step of the session may run."""
        failure = self._failure(error)
        self._progress.refuse(session, step_id, failure)
        self._progress.remove(session)
        if self.engine_down:
            self._on_engine_down()

    def _failure(self, error: Exception) -> SpecwireError:
        failure = internal_error(log, "an engine step failed", error)
        self._metrics.engine_failure()
        self._failures += 1
        if self.engine_down:
            failure = SpecwireError(Reason.ENGINE_DOWN, failure.message, failure.metadata)
        return failure


def _teller(loop: asyncio.AbstractEventLoop, launched: asyncio.Future[None]) -> Callable[[], None]:
    """For the engine's thread. An engine may tell several times, and behind the loop's end."""

    def tell() -> None:
        if not launched.done() and not loop.is_closed():
            loop.call_soon_threadsafe(_settle, launched)

    return tell


async def _either(
    loop: asyncio.AbstractEventLoop, launched: asyncio.Future[None], work: asyncio.Future[Any]
) -> None:
    """Until the step is launched, over, or long in coming."""
    work.add_done_callback(lambda _: _settle(launched))
    timer = loop.call_later(_LAUNCH_S, _settle, launched)
    try:
        await launched
    finally:
        timer.cancel()


def _settle(launched: asyncio.Future[None]) -> None:
    if not launched.done():
        launched.set_result(None)
