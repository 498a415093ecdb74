"""A batch through the engine and back: between two steps there is only what the next one needs.

What is to be said of the last step is written while the engine works on the next one: once it has
launched it, since until then both would need the interpreter, but soon in any case.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from engine.api import Drafter, Engine, Item, ItemResult, nothing
from specwire.errors import Reason, SpecwireError, internal_error
from target_svc.answers import Answers
from target_svc.engine_thread import EngineThread
from target_svc.metrics import Metrics
from target_svc.progress import Progress
from target_svc.proposing import Made, Wish, propose, wish_of
from target_svc.sessions import Session

log = logging.getLogger(__name__)

# After so many failed steps in a row the engine is given up.
_FAILURES_ALLOWED = 3
# A launch takes less; where it does not (kernels are compiled, a graph is captured) nobody waits.
_LAUNCH_S = 0.002

Answer = tuple[ItemResult, Made | None]
Batch = Sequence[tuple[Session, Item]]


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
    ) -> None:
        self._engine, self._thread, self._drafter = engine, thread, drafter
        self._progress, self._answers, self._metrics = progress, answers, metrics
        self._on_engine_down = on_engine_down
        self._failures = 0
        answers.on_lost = self._lost

    @property
    def engine_down(self) -> bool:
        return self._failures >= _FAILURES_ALLOWED

    async def step(self, batch: Batch, meanwhile: Callable[[], None]) -> None:
        """Runs a step and commits what came of it; calls `meanwhile` while the engine works."""
        loop = asyncio.get_running_loop()
        items = [item for _, item in batch]
        wishes = [wish_of(session) if item.draws else None for session, item in batch]
        launched: asyncio.Future[None] = loop.create_future()
        tell = _teller(loop, launched) if len(self._answers) else nothing
        work = self._thread.call(_run, self._engine, self._drafter, items, wishes, tell)
        if len(self._answers):
            try:
                await _either(loop, launched, work)
            finally:
                self._answers.flush()
        with self._answers.at_once():
            meanwhile()
            try:
                answers, computed, once_ns = await work
            except Exception as error:  # the engine raises for bugs only: the service outlives them
                self._failed([session for session, _ in batch], error)
                return
        self._failures, now = 0, loop.time()
        for (session, item), (result, proposal) in zip(batch, answers, strict=True):
            session.running = False
            step = session.step
            if session.closed or step is None:
                continue
            step.compute_s += computed
            step.once_ns += once_ns
            step.width = result.width
            self._progress.end_item(session, item, result, now, proposal)
        self._answers.stepped(len(items), computed)
        if not self._progress.ready:  # there is no step to be launched first
            self._answers.flush()

    def _failed(self, sessions: list[Session], error: Exception) -> None:
        """The sessions of a failed step end: what their pages hold is unknown."""
        failure = self._failure(error)
        for session in sessions:
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


def _run(
    engine: Engine,
    drafter: Drafter | None,
    items: list[Item],
    wishes: list[Wish | None],
    launched: Callable[[], None],
) -> tuple[list[Answer], float, int]:
    """On the engine's thread: the step, then the proposals that were asked for with it. Returns
    the seconds of the step too, and the nanoseconds beside them that it spent on what need not be
    done again; those of the drafter stand in its proposals."""
    before, once_before = time.perf_counter(), engine.once_ns
    results = engine.step(items, launched)
    once_ns = engine.once_ns - once_before
    computed = time.perf_counter() - before - once_ns / 1e9
    proposals: list[Made | None] = [None] * len(items)
    if drafter is not None and any(wish is not None for wish in wishes):
        proposals = propose(drafter, wishes, results)
    return list(zip(results, proposals, strict=True)), computed, once_ns
