"""The step loop: whatever is ready becomes a step; between steps pages change hands.

One task. The engine runs on its own thread; every page is allocated and freed between its steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from engine.api import Drafter, Engine, Item, ItemResult
from specwire.errors import Reason, SpecwireError, internal_error
from specwire.v1 import common_pb2, target_pb2
from target_svc.batch import BatchBuilder
from target_svc.engine_thread import EngineThread
from target_svc.metrics import Metrics
from target_svc.progress import Progress
from target_svc.proposing import Wish, propose, wish_of
from target_svc.residency import Residency
from target_svc.sessions import OpenSpec, Session, SessionTable, Step
from target_svc.settings import TargetSettings
from target_svc.shapes import Shapes
from target_svc.sharing import Sharing

log = logging.getLogger(__name__)

# After so many failed steps in a row the engine is given up.
_FAILURES_ALLOWED = 3
# Under load gauges are set so often: it takes the interpreter from the engine.
_REPORT_S = 0.1
# How often to look whether pages can be had, while those who need some wait.
_RETRY_S = 0.1


class Scheduler:
    """Owns the sessions' progress. Its methods are called on the event loop."""

    def __init__(
        self,
        engine: Engine,
        thread: EngineThread,
        settings: TargetSettings,
        metrics: Metrics,
        on_engine_down: Callable[[], None],
        drafter: Drafter | None = None,
    ) -> None:
        self.sessions = SessionTable()
        self._engine, self._thread, self._metrics = engine, thread, metrics
        self._drafter = drafter
        self._on_engine_down = on_engine_down
        self._wake = asyncio.Event()
        self._failures, self._reported = 0, 0.0
        shapes = Shapes(engine)
        sharing = Sharing(engine, self.sessions, shapes, metrics)
        self._residency = Residency(engine, settings, self.sessions, sharing, metrics)
        self._progress = Progress(
            shapes, self._residency, sharing, self.sessions, metrics, engine.info.vocab_size
        )
        self._batches = BatchBuilder(
            engine,
            settings.prefill_chunk_tokens,
            shapes,
            self._residency,
            metrics,
            draft_all=settings.draft_context == "all",
        )

    # -- what the intake calls -------------------------------------------------------------------

    @property
    def idle(self) -> asyncio.Event:
        return self._progress.idle

    @property
    def engine_down(self) -> bool:
        return self._failures >= _FAILURES_ALLOWED

    def load(self) -> target_pb2.TargetLoad:
        stats = self._engine.stats()
        without = [session for session in self.sessions if session.table is None]
        preempted = sum(session.preempted for session in without)
        return target_pb2.TargetLoad(
            sessions=len(self.sessions),
            waiting=len(without) - preempted,
            pages_free=stats.free,
            pages_total=stats.total,
            pages_cached=stats.cached,
            preempted=preempted,
        )

    def check_room(self, spec: OpenSpec) -> None:
        """Refuses a session that could never run, or would have to wait in a full queue."""
        self._residency.check_room(spec)

    def add(self, session: Session) -> None:
        """Takes a new session with its step 0; it waits until its pages are free."""
        self._progress.add(session)
        self._wake.set()

    def submit(self, session: Session, step: Step) -> None:
        """Takes a verify step. It may have to wait: one step of a session runs at a time."""
        self._progress.submit(session, step)
        self._wake.set()

    def remove(self, session: Session) -> None:
        """Forgets a session, even in the middle of a step; the next step finds its pages free."""
        self._progress.remove(session)
        self._wake.set()

    def remove_unlinked(self) -> None:
        """Forgets the sessions that nobody listens to any more."""
        for session in [session for session in self.sessions if session.link.closed]:
            self.remove(session)

    # -- the loop --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs steps until cancelled."""
        loop = asyncio.get_running_loop()
        ready = self._progress.ready
        while True:
            self._wake.clear()
            now = loop.time()
            self._expire(now)
            self._residency.free_released()
            self._residency.admit(ready.values(), now)
            batch = self._batches.build(ready.values(), now)
            if not batch:
                self._report(now)
                await self._sleep(loop)
                continue
            await self._step(loop, batch)

    async def _sleep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Waits for an item, for the next lease or deadline to end, or to look for pages again."""
        ends = [session.lease_until for session in self.sessions if not session.begun]
        ends += [s.step.deadline for s in self.sessions if s.step and s.step.deadline is not None]
        ends += [loop.time() + _RETRY_S] if self._progress.ready else []
        timer = loop.call_at(min(ends), self._wake.set) if ends else None
        await self._wake.wait()
        if timer is not None:
            timer.cancel()

    def _expire(self, now: float) -> None:
        """Ends steps past their deadline and sessions past their lease, but none in mid-step."""
        for session in self.sessions:
            step = session.step
            if step is not None and step.deadline is not None and now >= step.deadline:
                self._progress.fail(
                    session, SpecwireError(Reason.DEADLINE, "the deadline has passed"), now
                )
            elif now >= session.lease_until and not session.begun:
                self._metrics.dropped("lease_expired")
                self.remove(session)

    def _report(self, before: float) -> None:
        """Sets the gauges, unless they were set behind `before`."""
        if self._reported > before:
            return
        self._reported = asyncio.get_running_loop().time()
        load = self.load()
        self._metrics.state(
            pages_free=load.pages_free,
            pages_cached=load.pages_cached,
            sessions=load.sessions,
            sessions_waiting=load.waiting,
            sessions_preempted=load.preempted,
        )

    async def _step(
        self, loop: asyncio.AbstractEventLoop, batch: list[tuple[Session, Item]]
    ) -> None:
        items = [item for _, item in batch]
        wishes = [wish_of(session) if item.draws else None for session, item in batch]
        try:
            work = self._thread.call(_run, self._engine, self._drafter, items, wishes)
            self._report(loop.time() - _REPORT_S)  # while the engine works
            answers, computed, once_ns = await work
        except Exception as error:  # the engine raises for bugs only: the service outlives them
            self._engine_failed([session for session, _ in batch], error)
            return
        self._failures = 0
        for (session, item), (result, proposal) in zip(batch, answers, strict=True):
            session.running = False
            if session.closed or session.step is None:
                continue
            session.step.compute_s += computed
            session.step.once_ns += once_ns
            session.step.width = result.width
            try:
                self._progress.end_item(session, item, result, loop.time(), proposal)
            except Exception as error:  # rows that never came from the device: the engine's failure
                self._engine_failed([session], error)
        self._metrics.step(len(items), computed)

    def _engine_failed(self, sessions: list[Session], error: Exception) -> None:
        """The sessions of a failed step end: what their pages hold is unknown."""
        failure = internal_error(log, "an engine step failed", error)
        self._metrics.engine_failure()
        self._failures += 1
        if self.engine_down:
            failure = SpecwireError(Reason.ENGINE_DOWN, failure.message, failure.metadata)
        for session in sessions:
            session.running = False
            if not session.closed and session.step is not None:
                self._progress.refuse(session, session.step.step_id, failure)
                self.remove(session)
        if self.engine_down:
            self._on_engine_down()


Answer = tuple[ItemResult, common_pb2.Proposal | None]


def _run(
    engine: Engine, drafter: Drafter | None, items: list[Item], wishes: list[Wish | None]
) -> tuple[list[Answer], float, int]:
    """On the engine's thread: the step, then the proposals that were asked for with it. Returns
    the seconds of the step too, and the nanoseconds beside them that it spent on what need not be
    done again; those of the drafter stand in its proposals."""
    before, once_before = time.perf_counter(), engine.once_ns
    results = engine.step(items)
    once_ns = engine.once_ns - once_before
    computed = time.perf_counter() - before - once_ns / 1e9
    proposals: list[common_pb2.Proposal | None] = [None] * len(items)
    if drafter is not None and any(wish is not None for wish in wishes):
        proposals = propose(drafter, wishes, results)
    return list(zip(results, proposals, strict=True)), computed, once_ns
