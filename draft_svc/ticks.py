"""One tick of a draft's engine: jobs in the order they were put, then the proposals together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from draft_svc.jobs import Computed, Handle, Job, OpenJob, ProposeJob, UpdateJob
from draft_svc.methods.base import REASON_DEADLINE, AnyMethod, Draft, Request
from engine.errors import EngineError
from engine.kv.pool import PoolStats
from specwire.errors import Reason, SpecwireError, internal_error

log = logging.getLogger(__name__)

Methods = Mapping[str, AnyMethod]
Result = Callable[[], None]


class Ticks:
    """Carries jobs out with the methods. One thread at a time."""

    def __init__(self, methods: Methods) -> None:
        self._methods = methods

    def stats(self) -> PoolStats:
        """Pages of all methods."""
        all_stats = [method.stats() for method in self._methods.values()]
        return PoolStats(
            free=sum(s.free for s in all_stats),
            total=sum(s.total for s in all_stats),
            tables=sum(s.tables for s in all_stats),
        )

    def work(self) -> bool:
        """One piece of background work of each method; whether any has more."""
        more = False
        for name, method in self._methods.items():
            try:
                more |= method.work()
            except Exception as bug:
                internal_error(log, f"{name} failed to catch up", bug)
        return more

    def tick(self, jobs: list[Job]) -> list[Result]:
        """What came of the jobs, to be called on the event loop."""
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
        now = began / 1e9
        # For those whose time is over nobody waits; computing them would make others late.
        live = [job for job in jobs if job.handle.context is not None and job.deadline >= now]
        drafts: Sequence[Draft] = ()
        error: SpecwireError | None = None
        try:
            if live:
                drafts = method.propose([Request(j.handle.context, j.k, j.deadline) for j in live])
        except Exception as bug:
            error = internal_error(log, f"{name} failed to propose", bug)
        once = method.once_ns - once_before
        spent = time.monotonic_ns() - began - once
        found = dict(zip(map(id, live), drafts, strict=False))
        results: list[Result] = []
        for job in jobs:
            draft, failed = found.get(id(job)), None
            if draft is None and job.deadline < now:
                draft = Draft(reason=REASON_DEADLINE)
            elif draft is None:
                draft, failed = Draft(), error or _lost()
            results.append(partial(job.done, Computed(draft, failed, spent, once)))
        return results

    def _close(self, handle: Handle) -> None:
        context, handle.context = handle.context, None
        if context is not None:
            self._methods[handle.method].close(context)


def _lost() -> SpecwireError:
    return SpecwireError(Reason.SESSION_UNKNOWN, "the session has no context any more")
