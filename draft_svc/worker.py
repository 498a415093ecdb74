"""The engine thread: owns the methods and their contexts, and does all computing.

The event loop puts jobs in; everything that waits becomes one tick, and what one callback of the
loop put is never cut in two. Jobs take effect in the order they were put; the proposals of a tick
are computed together at its end. Results go back to the loop in one call per tick.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from draft_svc.jobs import Computed, Handle, Job, OpenJob, ProposeJob, UpdateJob
from draft_svc.methods.base import REASON_DEADLINE, AnyMethod, Draft, MethodInfo, Request
from engine.api import never
from engine.errors import BackendUnavailable, EngineError
from engine.kv.pool import PoolStats
from specwire.errors import Reason, SpecwireError, internal_error

log = logging.getLogger(__name__)

Methods = Mapping[str, AnyMethod]
Result = Callable[[], None]


class Worker:
    """Loads the methods on its thread, then serves jobs until `stop`. Methods are not warmed up
    once the start is `stopped`."""

    def __init__(self, load: Callable[[], Methods], stopped: Callable[[], bool] = never) -> None:
        self._load, self._stopped = load, stopped
        self._jobs: queue.SimpleQueue[list[Job] | None] = queue.SimpleQueue()
        self._next: list[Job] = []
        self._thread = threading.Thread(target=self._run, name="draft-engine", daemon=True)
        self._methods: Methods = {}
        self._stats = PoolStats(free=0, total=0, tables=0)
        self.infos: Mapping[str, MethodInfo] = {}

    async def start(self) -> None:
        """Returns when every method is loaded and warm; raises what loading raised."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._ready

    async def stop(self) -> None:
        """Ends the thread after the jobs that wait. Harmless when it never started; where the
        methods are still loading, which may take minutes, they are left to it."""
        if self._thread.is_alive():
            self._hand_over()
            self._jobs.put(None)
            if self.infos:
                await asyncio.to_thread(self._thread.join)

    def put(self, job: Job) -> None:
        """On the event loop. Rows, tokens and the question about them come in one message: the
        thread would begin with the rows alone, and with what it catches up on behind them."""
        if not self._next:
            self._loop.call_soon(self._hand_over)
        self._next.append(job)

    def _hand_over(self) -> None:
        if self._next:
            jobs, self._next = self._next, []
            self._jobs.put(jobs)

    @property
    def stats(self) -> PoolStats:
        """Pages of all methods after the last tick."""
        return self._stats

    @property
    def device(self) -> str:
        """What the methods run on: the GPUs among it, where there are some."""
        devices = dict.fromkeys(info.device for info in self.infos.values())
        return ", ".join(device for device in devices if device != "cpu") or "cpu"

    @property
    def ready(self) -> bool:
        """The methods are loaded and the thread serves jobs."""
        return bool(self.infos) and self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._methods = self._load()
            for name, method in self._methods.items():
                self._warm_up(name, method)
            self.infos = {name: method.info for name, method in self._methods.items()}
            self._publish_stats()
        except Exception as error:
            failure = error
            self._post([lambda: self._settle(failure)])
            return
        self._post([lambda: self._settle(None)])
        more_work = False
        while (jobs := self._take(wait=not more_work)) is not None:
            results = self._tick(jobs)
            self._publish_stats()
            if results:
                self._post(results)
            more_work = self._work()

    def _warm_up(self, name: str, method: AnyMethod) -> None:
        try:
            if not self._stopped():
                method.warm_up(self._stopped)
        except BackendUnavailable as error:
            raise SpecwireError(Reason.BACKEND_UNAVAILABLE, f"{name}: {error}") from error

    def _settle(self, error: Exception | None) -> None:
        if self._ready.done():  # the start was cancelled
            return
        if error is None:
            self._ready.set_result(None)
        else:
            self._ready.set_exception(error)

    def _post(self, results: list[Result]) -> None:
        def deliver() -> None:
            for result in results:
                result()

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(deliver)

    def _publish_stats(self) -> None:
        all_stats = [method.stats() for method in self._methods.values()]
        self._stats = PoolStats(
            free=sum(s.free for s in all_stats),
            total=sum(s.total for s in all_stats),
            tables=sum(s.tables for s in all_stats),
        )

    def _work(self) -> bool:
        """One piece of background work of each method; whether any has more."""
        more = False
        for name, method in self._methods.items():
            try:
                more |= method.work()
            except Exception as bug:
                internal_error(log, f"{name} failed to catch up", bug)
        return more

    def _take(self, wait: bool) -> list[Job] | None:
        """Everything that waits, at least one job where it is told to wait for one; None at the
        end.
        """
        taken: list[Job] = []
        if not wait and self._jobs.empty():
            return taken
        jobs = self._jobs.get()
        while jobs is not None:
            taken += jobs
            if self._jobs.empty():
                return taken
            jobs = self._jobs.get()
        if taken:
            self._jobs.put(None)  # first what came before the end
            return taken
        return None

    def _tick(self, jobs: list[Job]) -> list[Result]:
        # The newest of each session: who asked before has had an answer.
        wanted: dict[int, ProposeJob] = {}
        results: list[Result] = []
        for job in jobs:
            if isinstance(job, OpenJob):
                results.append(self._open(job))
            elif isinstance(job, ProposeJob):
                wanted[id(job.handle)] = job
            elif isinstance(job, UpdateJob):
                self._update(job)
            else:
                wanted.pop(id(job.handle), None)
                self._close(job.handle)
        by_method: dict[str, list[ProposeJob]] = {}
        for ask in wanted.values():
            by_method.setdefault(ask.handle.method, []).append(ask)
        for name, asks in by_method.items():
            results += self._propose(name, asks)
        return results

    def _open(self, job: OpenJob) -> Result:
        done, error, have_rows = job.done, None, (0, 0)
        method = self._methods[job.handle.method]
        try:
            job.handle.context = method.open(job.ids, job.sampling)
            have_rows = method.restore(job.handle.context, job.target_fingerprint)
        except EngineError as refusal:
            error = SpecwireError(Reason.KV_PAGES_EXHAUSTED, str(refusal))
        except Exception as bug:
            error = internal_error(log, "opening a session failed", bug)
        return lambda: done(error, have_rows)

    def _update(self, job: UpdateJob) -> None:
        context = job.handle.context
        if context is None:
            return
        try:
            self._methods[job.handle.method].update(context, job.keep, job.tokens, job.rows)
        except Exception as bug:
            internal_error(log, "an update failed; its session proposes no more", bug)
            self._close(job.handle)

    def _propose(self, name: str, jobs: list[ProposeJob]) -> list[Result]:
        method = self._methods[name]
        began, once_before = time.monotonic_ns(), method.once_ns
        now = time.monotonic()
        # For those whose time is over nobody waits; computing them would make others late.
        over = {id(job): Draft(reason=REASON_DEADLINE) for job in jobs if job.deadline < now}
        live = [job for job in jobs if job.handle.context is not None and id(job) not in over]
        drafts: Sequence[Draft] = ()
        error: SpecwireError | None = None
        try:
            if live:
                drafts = method.propose([Request(j.handle.context, j.k, j.deadline) for j in live])
        except Exception as bug:
            error = internal_error(log, f"{name} failed to propose", bug)
        once = method.once_ns - once_before
        spent = time.monotonic_ns() - began - once
        lost = SpecwireError(Reason.SESSION_UNKNOWN, "the session has no context any more")
        by_job = over | dict(zip((id(job) for job in live), drafts, strict=False))
        results: list[Result] = []
        for job in jobs:
            draft = by_job.get(id(job))
            failed = None if draft is not None else (error or lost)
            results.append(partial(job.done, Computed(draft or Draft(), failed, spent, once)))
        return results

    def _close(self, handle: Handle) -> None:
        context, handle.context = handle.context, None
        if context is not None:
            self._methods[handle.method].close(context)
