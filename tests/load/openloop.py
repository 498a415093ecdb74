"""Open-loop load: requests start when the schedule says, however slow the answers are.

Latency counts from the scheduled time. A server that stalls therefore shows in every request that
was due meanwhile, and not only in the one that found it stalled (coordinated omission).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from specwire.errors import SpecwireError

UNFINISHED = "unfinished"


@dataclass(frozen=True, slots=True)
class Plan:
    """Poisson arrivals: `rate_per_s` on average for `duration_s`; `drain_s` for the last to end."""

    rate_per_s: float
    duration_s: float
    seed: int = 0
    drain_s: float = 30.0

    def arrivals(self) -> list[float]:
        """Seconds after the start, rising; the same for the same seed."""
        rng, at, found = random.Random(self.seed), 0.0, []
        while (at := at + rng.expovariate(self.rate_per_s)) < self.duration_s:
            found.append(at)
        return found


@dataclass(slots=True)
class Sample:
    """One request. Times are the loop's seconds; `spans` are milliseconds by name."""

    scheduled: float
    started: float = 0.0
    ended: float = 0.0
    error: str = ""
    tokens: int = 0
    spans: dict[str, list[float]] = field(default_factory=dict)

    def span(self, name: str, since: float | None = None) -> None:
        """Notes the time from `since` (unset: when the request was due) to now."""
        begun = self.scheduled if since is None else since
        took_ms = (asyncio.get_running_loop().time() - begun) * 1000
        self.spans.setdefault(name, []).append(took_ms)


Work = Callable[[int, Sample], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Run:
    samples: list[Sample]
    elapsed_s: float


async def run(plan: Plan, work: Work) -> Run:
    """Calls `work(number, sample)` for each arrival. What has not ended `drain_s` after the last
    arrival is cancelled and counted as unfinished, with its age.
    """
    loop = asyncio.get_running_loop()
    begin = loop.time()
    samples = [Sample(begin + at) for at in plan.arrivals()]
    tasks = []
    for number, sample in enumerate(samples):
        await asyncio.sleep(max(0.0, sample.scheduled - loop.time()))
        tasks.append(asyncio.create_task(_one(work, number, sample)))
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=plan.drain_s)
        for task in late:
            task.cancel()
        # A bug of the generator is raised here; what a server does wrong is in the samples.
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
    return Run(samples, loop.time() - begin)


async def _one(work: Work, number: int, sample: Sample) -> None:
    loop = asyncio.get_running_loop()
    sample.started = loop.time()
    try:
        await work(number, sample)
    except SpecwireError as error:
        sample.error = error.reason.value
    except asyncio.CancelledError:
        sample.error = UNFINISHED
        raise
    finally:
        sample.ended = loop.time()
