"""The step loop: whatever is ready becomes a step; between steps pages change hands.

One task. The engine runs on its own thread; every page is allocated and freed between its steps.
Between two steps there is only what the next one needs: what is to be said of the last one is
written while the next one runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.api import Drafter, Engine, Item
from specwire.errors import Reason, SpecwireError
from specwire.poll import BusyPoll
from specwire.v1 import target_pb2
from target_svc.answers import Answers
from target_svc.batch import BatchBuilder
from target_svc.engine_thread import EngineThread
from target_svc.metrics import Metrics
from target_svc.progress import Progress
from target_svc.residency import Residency
from target_svc.running import Running
from target_svc.session_table import SessionTable
from target_svc.sessions import OpenSpec, Session, Step
from target_svc.settings import TargetSettings
from target_svc.shapes import Shapes
from target_svc.sharing import Sharing

# Gauges are set so often at most: it takes the interpreter from the engine, or from a question to
# a draft.
_REPORT_S = 0.1
# How often to look whether pages can be had, while those who need some wait.
_RETRY_S = 0.1
# Leases are looked at so often; a deadline that comes earlier is kept all the same.
_EXPIRE_S = 0.05


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
        self._engine, self._metrics = engine, metrics
        self._wake = asyncio.Event()
        self._reported = 0.0
        self._unreported = self._sleeps = False
        # Of a step that did not run in the step loop, which ends with it.
        self._bug: Exception | None = None
        # When leases and deadlines are looked at next.
        self._look_at = 0.0
        self._answers = Answers(metrics)
        shapes = Shapes(engine)
        sharing = Sharing(engine, self.sessions, shapes, metrics)
        self._residency = Residency(engine, settings, self.sessions, sharing, metrics)
        self._progress = Progress(
            shapes,
            self._residency,
            sharing,
            self.sessions,
            metrics,
            self._answers,
            engine.info.vocab_size,
        )
        self._progress.on_ready = self._woken
        self._batches = BatchBuilder(
            engine,
            settings.prefill_chunk_tokens or engine.info.prefill_chunk,
            shapes,
            self._residency,
            metrics,
            draft_all=settings.draft_context == "all",
        )
        poll = BusyPoll(settings.busy_poll_us)
        self._running = Running(
            engine, thread, drafter, self._progress, self._answers, metrics, on_engine_down, poll
        )

    # -- what the intake calls -------------------------------------------------------------------

    @property
    def idle(self) -> asyncio.Event:
        return self._progress.idle

    @property
    def engine_down(self) -> bool:
        return self._running.engine_down

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
        assert session.step is not None
        self._progress.add(session)
        self._woken(session.step)

    def submit(self, session: Session, step: Step) -> None:
        """Takes a verify step. It may have to wait: one step of a session runs at a time."""
        self._progress.submit(session, step)
        self._woken(step)

    def _woken(self, step: Step | None) -> None:
        if step is not None and step.deadline is not None:
            self._look_at = min(self._look_at, step.deadline)
        self._wake.set()

    def flush(self) -> None:
        """Says what is still to be said of steps that have ended."""
        self._answers.flush()

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
        while True:
            self._wake.clear()
            if self._bug is not None:
                raise self._bug
            if not (batch := self._batch(loop.time())):
                self.flush()
                self._report_at_times()
                await self._sleep(loop)
                continue
            await self._running.step(batch, self._report_at_times)

    def hurry(self) -> None:
        """Behind the answers of a draft service. Where one session alone waited for them its next
        step is over when this returns, and its next question on the way."""
        ready = self._progress.ready.values()
        if not (ready and self._sleeps and self._running.may_step_here(ready)):
            return
        try:
            batch = self._batch(asyncio.get_running_loop().time())
            if batch:
                self._running.step_here(batch)
        except Exception as bug:  # it ends the step loop, not the stream that the answers came on
            self._bug = bug
            self._wake.set()

    def _batch(self, now: float) -> list[tuple[Session, Item]]:
        """What runs next, its pages at hand."""
        if now >= self._look_at:
            self._expire(now)
        ready = self._progress.ready.values()
        self._residency.free_released()
        self._residency.admit(ready, now)
        return self._batches.build(ready, now)

    async def _sleep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Waits for an item, for the next lease or deadline to end, or to look for pages again."""
        ends = [session.lease_until for session in self.sessions if not session.begun]
        ends += [s.step.deadline for s in self.sessions if s.step and s.step.deadline is not None]
        ends += [loop.time() + _RETRY_S] if self._progress.ready else []
        ends += [self._reported + _REPORT_S] if self._unreported else []
        timer = loop.call_at(min(ends), self._look) if ends else None
        self._sleeps = True
        try:
            await self._wake.wait()
        finally:
            self._sleeps = False
            if timer is not None:
                timer.cancel()

    def _look(self) -> None:
        self._look_at = 0.0
        self._wake.set()

    def _expire(self, now: float) -> None:
        """Ends steps past their deadline and sessions past their lease, but none in mid-step."""
        self._look_at = now + _EXPIRE_S
        for session in self.sessions:
            step = session.step
            if step is not None and step.deadline is not None and now >= step.deadline:
                self._progress.fail(
                    session, SpecwireError(Reason.DEADLINE, "the deadline has passed"), now
                )
            elif now >= session.lease_until and not session.begun:
                self._metrics.dropped("lease_expired")
                self.flush()  # what has ended is said
                self.remove(session)
            elif step is not None and step.deadline is not None:
                self._look_at = min(self._look_at, step.deadline)

    def _report_at_times(self) -> None:
        """Sets the gauges, or leaves it for later where they were set just now."""
        now = asyncio.get_running_loop().time()
        self._unreported = now < self._reported + _REPORT_S
        if self._unreported:
            return
        self._reported = now
        load = self.load()
        self._metrics.state(
            pages_free=load.pages_free,
            pages_cached=load.pages_cached,
            sessions=load.sessions,
            sessions_waiting=load.waiting,
            sessions_preempted=load.preempted,
        )
