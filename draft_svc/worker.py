"""The engine thread of a draft service: owns methods and contexts, and does the computing.

The event loop puts jobs in; everything that waits becomes one tick, and what one callback of the
loop put is never cut in two. Jobs take effect in the order they were put; the proposals of a tick
are computed together at its end. Results go back to the loop in one call per tick.

A GPU computes for the loop as well as for the thread. So where one session alone asks, time and
again, nothing else waits and proposals are short, the tick runs on the loop: the way to the thread
and back takes as long as some forwards do. On a CPU it never does: torch has threads of its own for
each thread that calls.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import torch

from draft_svc.jobs import Handle, Job, OpenJob, ProposeJob
from draft_svc.methods.base import AnyMethod, MethodInfo
from draft_svc.ticks import Methods, Result, Ticks
from engine.api import never
from engine.errors import BackendUnavailable
from engine.kv.pool import PoolStats
from specwire.errors import Reason, SpecwireError
from specwire.poll import BusyPoll

# Proposals that took longer are the last ones on the loop, until the thread has had shorter ones:
# meanwhile nobody reads what comes, heartbeats and closes among it.
_BRIEF_S = 0.01
# How soon the thread looks after what ticks on the loop leave to it. Not behind each of them: the
# next question would find it at that.
_TIDY_S = 0.05


class Worker:
    """Loads the methods on its thread, then serves jobs until `stop`. Methods are not warmed up
    once the start is `stopped`."""

    def __init__(
        self,
        load: Callable[[], Methods],
        stopped: Callable[[], bool] = never,
        poll: BusyPoll | None = None,
    ) -> None:
        self._load, self._stopped = load, stopped
        self._poll = poll or BusyPoll(0)
        self._jobs: queue.SimpleQueue[list[Job] | None] = queue.SimpleQueue()
        self._next: list[Job] = []
        self._thread = threading.Thread(target=self._run, name="draft-engine", daemon=True)
        self._ticks = Ticks({})
        # Held by whichever thread computes.
        self._computing = threading.Lock()
        # How many lists of jobs the thread was given, and how many it is through with.
        self._given = self._done = 0
        self._results: deque[Result] = deque()
        self._in_place = False
        self._brief = True
        # Who asked alone with the latest jobs that did.
        self._asked: Handle | None = None
        self._tidying: asyncio.TimerHandle | None = None
        self._stats = PoolStats(free=0, total=0, tables=0)
        self.infos: Mapping[str, MethodInfo] = {}

    async def start(self) -> None:
        """Returns when every method is loaded and warm; raises what loading raised."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[int | None] = self._loop.create_future()
        self._thread.start()
        gpu = await self._ready
        if gpu is not None:  # of a thread: the current one of the loop's may be another
            torch.cuda.set_device(gpu)
        self._in_place = self.device != "cpu"

    async def stop(self) -> None:
        """Ends the thread after the jobs that wait. Harmless when it never started; where the
        methods are still loading, which may take minutes, they are left to it."""
        self._in_place = False
        if self._tidying is not None:
            self._tidying.cancel()
        if self._thread.is_alive():
            self.hand_over()
            self._jobs.put(None)
            if self.infos:
                await asyncio.to_thread(self._thread.join)

    def put(self, job: Job) -> None:
        """On the event loop. Rows, tokens and the question about them come in one message: the
        thread would begin with the rows alone, and with what it catches up on behind them."""
        if not self._next:
            self._loop.call_soon(self.hand_over)
        self._next.append(job)

    def hand_over(self) -> None:
        """Begins with what was put, where whoever put it will put no more: its answers are there
        when this returns, or come later."""
        if self._next:
            jobs, self._next = self._next, []
            alone = self._asks_alone(jobs)
            if not (self._in_place and self._brief and alone and self._here(jobs)):
                self._poll.end()
                self._give(jobs)

    def _asks_alone(self, jobs: list[Job]) -> bool:
        """Whether one session asks, and no other has asked since it did the last time: those that
        ask in turn are computed together, behind what others put meanwhile. To open a session may
        take long."""
        asking = [job.handle for job in jobs if isinstance(job, ProposeJob)]
        if not asking:
            return False
        before, self._asked = self._asked, asking[0] if len(asking) == 1 else None
        return self._asked is before is not None and not any(isinstance(j, OpenJob) for j in jobs)

    def _give(self, jobs: list[Job]) -> None:
        self._given += 1
        self._jobs.put(jobs)

    def _here(self, jobs: list[Job]) -> bool:
        """Carries the jobs out on the loop, unless the thread has something to do."""
        if self._done != self._given or not self._computing.acquire(blocking=False):
            return False
        try:
            results = self._tick(jobs)
        finally:
            self._computing.release()
        self._results += results
        self._deliver()
        self._poll.begin()  # the next question comes in a step's time
        if self._tidying is None:
            self._tidying = self._loop.call_later(_TIDY_S, self._tidy)
        return True

    def _tidy(self) -> None:
        self._tidying = None
        self._give([])

    @property
    def stats(self) -> PoolStats:
        """Pages of all methods after the last tick of the thread."""
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
            methods = self._load()
            for name, method in methods.items():
                self._warm_up(name, method)
            self._ticks = Ticks(methods)
            self._stats = self._ticks.stats()
            self.infos = {name: method.info for name, method in methods.items()}
            gpu = _current_gpu()
        except Exception as error:
            failure = error
            self._post([lambda: self._settle(None, failure)])
            return
        self._post([lambda: self._settle(gpu)])
        more_work = False
        while (taken := self._take(wait=not more_work)) is not None:
            jobs, lists = taken
            with self._computing:
                results = self._tick(jobs)
                self._stats = self._ticks.stats()
            if results:
                self._post(results)
            self._done += lists
            with self._computing:
                more_work = self._ticks.work()

    def _warm_up(self, name: str, method: AnyMethod) -> None:
        try:
            if not self._stopped():
                method.warm_up(self._stopped)
        except BackendUnavailable as error:
            raise SpecwireError(Reason.BACKEND_UNAVAILABLE, f"{name}: {error}") from error

    def _settle(self, gpu: int | None, error: Exception | None = None) -> None:
        if self._ready.done():  # the start was cancelled
            return
        if error is None:
            self._ready.set_result(gpu)
        else:
            self._ready.set_exception(error)

    def _tick(self, jobs: list[Job]) -> list[Result]:
        began = time.monotonic()
        results = self._ticks.tick(jobs)
        if any(isinstance(job, ProposeJob) for job in jobs):
            self._brief = time.monotonic() - began < _BRIEF_S
        return results

    def _post(self, results: list[Result]) -> None:
        self._results += results
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        """In the order of the ticks, whichever thread they ran on."""
        while self._results:
            self._results.popleft()()

    def _take(self, wait: bool) -> tuple[list[Job], int] | None:
        """Everything that waits, and of how many lists it is; at least one where it is told to
        wait for one. None at the end.
        """
        taken: list[Job] = []
        lists = 0
        if not wait and self._jobs.empty():
            return taken, lists
        jobs = self._jobs.get()
        while jobs is not None:
            taken += jobs
            lists += 1
            if self._jobs.empty():
                return taken, lists
            jobs = self._jobs.get()
        if taken:
            self._jobs.put(None)  # first what came before the end
            return taken, lists
        return None


def _current_gpu() -> int | None:
    """Of this thread; None where torch uses none."""
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_device() if used else None
