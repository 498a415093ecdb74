"""Part of `host_cost`: a service with a free engine, or a client, as a process that tells what it
spent.

`python -m tests.load.host_services ROLE OPTIONS`; says "up" on stdout, then answers each line on
stdin with one of JSON, and ends when stdin does. With --profile FILE the event loop's calls are
counted (cProfile); --profile-engine FILE: those of the engine's thread.
"""

from __future__ import annotations

from specwire.environment import loaded, prepare

prepare()  # before torch and grpc load

import argparse
import asyncio
import cProfile
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.host import CoordinatorHost
from coordinator.settings import CoordinatorSettings
from coordinator.tokenizer_cache import TokenizerCache
from draft_svc.host import DraftHost
from draft_svc.protocol import Limits
from specwire.client import AsyncClient
from specwire.process import run_service
from target_svc.app import Loaded, TargetApp
from target_svc.settings import TargetSettings
from tests.load.bare_engine import BareEngine
from tests.load.free_model import FreeDrafter, FreeEngine, FreeMethod
from tests.load.host_clients import load
from tests.service.coordinator_harness import document

Counts = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Options:
    role: str
    address: str
    target: str
    draft: str
    sessions: int
    pause_s: float
    profile: str
    profile_engine: str
    asked: str
    bare: bool


def parse() -> Options:
    made = argparse.ArgumentParser()
    made.add_argument("role", choices=list(ROLES))
    made.add_argument("--address", required=True)
    made.add_argument("--target", default="")
    made.add_argument("--draft", default="")
    made.add_argument("--sessions", type=int, default=128)
    made.add_argument("--pause-s", type=float, default=0.0)
    made.add_argument("--profile", default="")
    made.add_argument("--profile-engine", default="")
    made.add_argument("--asked", default="", help="of a client: its sessions, as JSON")
    made.add_argument("--bare", action="store_true")
    return Options(**vars(made.parse_args()))


def threads_ns() -> dict[str, int]:
    """CPU time of the event loop, the engine's thread and all the others."""
    spent = {"loop": 0, "engine": 0}
    for thread in threading.enumerate():
        name = "engine" if "engine" in thread.name else "loop"
        if thread is threading.main_thread() or name == "engine":
            assert thread.ident is not None
            spent[name] = time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident))
    spent["others"] = time.process_time_ns() - sum(spent.values())
    return spent


@asynccontextmanager
async def target(o: Options, profiled: Callable[[Any], None]) -> AsyncIterator[Counts]:
    settings = TargetSettings(address=o.address, drain_ms=0, reflection=False)
    engine = (BareEngine if o.bare else FreeEngine)(o.sessions, o.pause_s)
    drafter = FreeDrafter(o.pause_s) if o.role == "colocated" else None
    if drafter is not None and isinstance(engine, FreeEngine):
        engine.attach(drafter, ())
    app = TargetApp(settings, lambda _: Loaded(engine, document()), drafter)
    await app.start()
    await app._thread.call(profiled, None)
    try:
        names = ("steps", "items", "step_ns", "gap_ns")
        yield (
            lambda: (
                {name: getattr(engine, name) for name in names} | {"stamps": engine.stamps.take()}
            )
        )
    finally:
        await app.stop()


@asynccontextmanager
async def draft(o: Options, profiled: Callable[[Any], None]) -> AsyncIterator[Counts]:
    method = FreeMethod(o.pause_s)
    limits = Limits(256, 5_000, 1 << 22, 10_000, 60_000)

    def load() -> dict[str, Any]:
        profiled(None)
        return {"toy": method}

    host = DraftHost(load, address=o.address, limits=limits, default_method="toy")
    async with host:
        yield lambda: {
            "steps": method.steps,
            "items": method.items,
            "stamps": method.stamps.take(),
        }


@asynccontextmanager
async def coordinator(o: Options, profiled: Callable[[Any], None]) -> AsyncIterator[Counts]:
    settings = CoordinatorSettings(
        address=o.address,
        target=(o.target,),
        draft=(o.draft,) if o.draft else (),
        proposal_wait_min_ms=10_000,
    )
    cache = TokenizerCache(Path(o.address.removeprefix("unix:")).parent)
    async with CoordinatorHost(settings, cache) as host:
        for worker in host.fleet.workers:
            assert await worker.link.wait_ready(30), f"{worker.address} is not ready"
        yield dict


@asynccontextmanager
async def client(o: Options, profiled: Callable[[Any], None]) -> AsyncIterator[Counts]:
    async with AsyncClient(o.target) as client, load(client, json.loads(o.asked)) as counts:
        yield counts


ROLES = {
    "target": target,
    "colocated": target,
    "draft": draft,
    "coordinator": coordinator,
    "client": client,
}


async def serve(o: Options, stop: asyncio.Event) -> None:
    engine_profile = cProfile.Profile(time.thread_time) if o.profile_engine else None

    def profiled(_: Any) -> None:
        if engine_profile is not None:
            engine_profile.enable()

    async with ROLES[o.role](o, profiled) as counts:
        loop_profile = cProfile.Profile(time.thread_time) if o.profile else None

        def tell() -> None:
            if not sys.stdin.readline():
                stop.set()
                return
            print(json.dumps(counts() | threads_ns()), flush=True)
            if loop_profile is not None:
                loop_profile.enable()

        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), tell)
        loaded()
        print("up", flush=True)
        await stop.wait()
        if loop_profile is not None:
            loop_profile.disable()
            loop_profile.dump_stats(o.profile)
    if engine_profile is not None:
        engine_profile.dump_stats(o.profile_engine)


if __name__ == "__main__":
    run_service(partial(serve, parse()))
