"""The step loop: whatever is ready becomes a step; between steps pages change hands.

One task. The engine runs on its own thread; every page is allocated and freed between its steps.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

from engine.api import Engine, Item, ItemResult
from engine.errors import OutOfPages
from engine.kv.pool import PageTable
from specwire.errors import Reason, SpecwireError
from specwire.tensors import Rows
from specwire.v1 import target_pb2
from target_svc import results
from target_svc.batch import BatchBuilder
from target_svc.decode import key_to_wire
from target_svc.metrics import Metrics
from target_svc.rows import rows_of
from target_svc.sessions import Session, SessionTable, Step
from target_svc.settings import TargetSettings

log = logging.getLogger(__name__)

# After so many failed steps in a row the engine is given up.
_FAILURES_ALLOWED = 3


class Scheduler:
    """Owns the sessions' progress. Its methods are called on the event loop."""

    def __init__(
        self,
        engine: Engine,
        thread: Executor,
        settings: TargetSettings,
        metrics: Metrics,
        on_engine_down: Callable[[], None],
    ) -> None:
        self.sessions = SessionTable()
        self.idle = asyncio.Event()
        self._engine, self._thread, self._settings, self._metrics = (
            engine,
            thread,
            settings,
            metrics,
        )
        self._on_engine_down = on_engine_down
        self._waiting: deque[Session] = deque()
        # Sessions with a step that may run, the longest waiting first.
        self._ready: dict[int, Session] = {}
        self._released: list[PageTable] = []
        self._wake = asyncio.Event()
        self._failures = 0
        self._batches = BatchBuilder(engine, settings.prefill_chunk_tokens, metrics)
        self.idle.set()

    # -- what the intake calls -------------------------------------------------------------------

    @property
    def engine_down(self) -> bool:
        return self._failures >= _FAILURES_ALLOWED

    def load(self) -> target_pb2.TargetLoad:
        stats = self._engine.stats()
        return target_pb2.TargetLoad(
            sessions=len(self.sessions),
            waiting=len(self._waiting),
            pages_free=stats.free,
            pages_total=stats.total,
        )

    def check_room(self, limit_len: int) -> None:
        """Refuses a session that could never run, or that would have to wait in a full queue."""
        stats = self._engine.stats()
        needed = self._pages(limit_len)
        if needed > stats.total:
            raise SpecwireError(
                Reason.KV_PAGES_EXHAUSTED,
                f"prompt and max_new_tokens need {needed} KV pages; the target has {stats.total}",
                {"needed": str(needed), "total": str(stats.total)},
                retry_after_ms=0,
            )
        # Those that came in this moment wait too, but not for pages: what is free may be for them.
        ahead = sum(self._pages(session.spec.limit_len) for session in self._waiting)
        free = stats.free + sum(len(table.pages) for table in self._released)
        limit = self._settings.max_waiting
        if ahead + needed > free and len(self._waiting) >= limit:
            text = f"{limit} sessions already wait for KV pages"
            raise SpecwireError(Reason.QUEUE_FULL, text, {"limit": str(limit)})

    def _pages(self, length: int) -> int:
        return -(-length // self._engine.attention.page_tokens)

    def add(self, session: Session) -> None:
        """Takes a new session with its step 0; it waits here until its pages are free."""
        self.sessions.add(session)
        self.idle.clear()
        self._waiting.append(session)
        self._wake.set()

    def submit(self, session: Session, step: Step) -> None:
        """Takes a verify step. It may have to wait: one step of a session runs at a time."""
        if session.next is not None:
            self._metrics.dropped("superseded_step")
        session.next = step
        if session.step is not None and not session.step.asked and not session.running:
            session.step = None  # the free run ends here
        self._begin_next(session)
        self._wake.set()

    def remove(self, session: Session) -> None:
        """Forgets a session, even in the middle of a step; the next step finds its pages free."""
        self.sessions.remove(session)
        self._ready.pop(id(session), None)
        if session in self._waiting:
            self._waiting.remove(session)
        if session.sink is not None:
            session.sink.release()
        if session.table is not None:
            self._released.append(session.table)
        if not len(self.sessions):
            self.idle.set()
        self._wake.set()

    def remove_unlinked(self) -> None:
        """Forgets the sessions that nobody listens to any more."""
        for session in self.sessions:
            if session.link.closed:
                self.remove(session)

    def refuse(
        self, session: Session, step_id: int, error: SpecwireError, have_len: int = 0
    ) -> None:
        self._metrics.refused(error.reason)
        refused = target_pb2.TargetRefused(
            key=key_to_wire(session.key), step_id=step_id, error=error.to_item(), have_len=have_len
        )
        session.link.send(target_pb2.TargetReply(refused=refused))

    # -- the loop --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs steps until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            self._expire(loop.time())
            self._free_pages()
            self._admit()
            batch = self._batches.build(self._ready.values())
            if not batch:
                await self._sleep(loop)
                continue
            await self._step(loop, batch)
            # Lets the links write the verdicts before the next step takes the interpreter.
            await asyncio.sleep(0)

    async def _sleep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Waits for an item, or for the next lease or deadline to end."""
        ends = [session.lease_until for session in self.sessions]
        ends += [s.step.deadline for s in self.sessions if s.step and s.step.deadline is not None]
        timer = loop.call_at(min(ends), self._wake.set) if ends else None
        await self._wake.wait()
        if timer is not None:
            timer.cancel()

    def _expire(self, now: float) -> None:
        """Ends steps past their deadline and sessions past their lease, but none in mid-step."""
        for session in self.sessions:
            step = session.step
            if step is not None and step.deadline is not None and now >= step.deadline:
                self._fail(session, SpecwireError(Reason.DEADLINE, "the deadline has passed"))
            elif now >= session.lease_until and (step is None or step.started is None):
                self._metrics.dropped("lease_expired")
                self.remove(session)

    def _free_pages(self) -> None:
        for table in self._released:
            table.free()
        self._released.clear()

    def _admit(self) -> None:
        """Gives pages to waiting sessions in the order they came.

        The first that does not fit holds the others back, or long ones would wait for ever.
        """
        while self._waiting:
            session = self._waiting[0]
            try:
                session.table = self._engine.allocate(session.spec.limit_len)
            except OutOfPages:
                return
            self._waiting.popleft()
            self._ready[id(session)] = session

    async def _step(
        self, loop: asyncio.AbstractEventLoop, batch: list[tuple[Session, Item]]
    ) -> None:
        items = [item for _, item in batch]
        before = time.perf_counter()
        try:
            answers = await loop.run_in_executor(self._thread, _run, self._engine, items)
        except Exception as error:  # the engine raises for bugs only: the service outlives them
            self._engine_failed([session for session, _ in batch], error)
            return
        self._failures = 0
        elapsed = time.perf_counter() - before
        self._metrics.step(len(items), elapsed)
        for (session, item), (result, rows) in zip(batch, answers, strict=True):
            session.running = False
            if session.closed or session.step is None:
                continue
            session.step.compute_s += elapsed
            session.step.width = result.width
            results.keep_scores(session, item, result)
            if item.draws:
                self._finish_step(session, session.step, item, result, rows, loop.time())
            else:
                results.end_chunk(session, item, rows)
                # More of this prompt is to come: behind the others.
                self._ready[id(session)] = self._ready.pop(id(session))

    def _finish_step(
        self,
        session: Session,
        step: Step,
        item: Item,
        result: ItemResult,
        rows: Rows | None,
        now: float,
    ) -> None:
        """Commits and answers a step, then begins what is next: a newer item, or the free run."""
        verdict = results.commit(session, step, result)
        session.link.send(target_pb2.TargetReply(verdict=verdict))
        results.end_step(session, step.step_id, item, rows)
        kind = "verify" if step.step_id else "open"
        self._metrics.verdict(kind, verdict.accepted, len(verdict.tokens))
        if step.asked:
            session.renew(now)
        session.step = None
        self._ready.pop(id(session), None)
        if session.next is not None:
            self._begin_next(session)
        elif step.free_run and not session.finished:
            self._start(session, results.free_step(session, step))

    # -- steps of one session --------------------------------------------------------------------

    def _start(self, session: Session, step: Step) -> None:
        session.step = step
        self._ready[id(session)] = session

    def _begin_next(self, session: Session) -> None:
        """Starts the step that waits, when the session is free and the lengths agree."""
        if session.step is not None or session.next is None or session.opening:
            return
        step, session.next = session.next, None
        self._ready.pop(id(session), None)
        have = len(session.ids)
        if step.base_len > have:
            text = f"the target has {have} committed tokens, base_len is {step.base_len}"
            self.refuse(session, step.step_id, SpecwireError(Reason.NEED_TOKENS, text), have)
            return
        if step.base_len < have:
            session.truncate(step.base_len)
        if session.finished:
            error = SpecwireError.field(
                "base_len", step.base_len, f"below {have}: the session has finished"
            )
            self.refuse(session, step.step_id, error, have)
            return
        self._start(session, step)

    def _fail(self, session: Session, error: SpecwireError) -> None:
        """Refuses the current step. A session that never opened goes with it."""
        assert session.step is not None
        step_id, session.step = session.step.step_id, None
        self._ready.pop(id(session), None)
        self.refuse(session, step_id, error, 0 if session.opening else len(session.ids))
        if session.opening:
            self.remove(session)
        else:
            self._begin_next(session)

    def _engine_failed(self, sessions: list[Session], error: Exception) -> None:
        """The sessions of a failed step end: what their pages hold is unknown."""
        incident = secrets.token_hex(8)
        log.error("incident %s: an engine step failed", incident, exc_info=error)
        self._metrics.engine_failure()
        self._failures += 1
        reason = Reason.ENGINE_DOWN if self.engine_down else Reason.INTERNAL
        text = f"the engine failed; the target's log has incident {incident}"
        for session in sessions:
            session.running = False
            if not session.closed and session.step is not None:
                failure = SpecwireError(reason, text, {"incident": incident})
                self.refuse(session, session.step.step_id, failure)
                self.remove(session)
        if self.engine_down:
            self._on_engine_down()


def _run(engine: Engine, items: list[Item]) -> list[tuple[ItemResult, Rows | None]]:
    """On the engine's thread."""
    return [(result, rows_of(result)) for result in engine.step(items)]
