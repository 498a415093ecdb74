"""What a start takes, and what is left for the first sessions to wait for: with shapes met at start
or not (`warm_sessions`), with Triton's kernels compiled before or not.

python -m tests.load.warm_start --model DIR/target --draft DIR/dflash     as random_pair writes them
python -m tests.load.warm_start --shape smollm2-135m --colocate           writes a pair first

Of each case: seconds until each service serves, kernels compiled and graphs captured until then and
behind it, and the longest and the median of the first gaps between two messages of a session.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from coordinator.local import Child
from engine.models.draft_dialects import parse_draft
from engine.models.draft_loading import DraftTarget
from engine.weights import read_json
from specwire.client import AsyncClient
from specwire.errors import SpecwireError
from tests.load.cli import _say as say
from tests.load.grid_asking import workers_of
from tests.load.grid_services import NotStarted, Services
from tests.load.random_pair import SHAPES, write_pair
from tests.load.session_clients import Asked, Stream, session

# Gaps of a session that count: those in which what is met for the first time is met.
FIRST = 20


@dataclass(frozen=True)
class Case:
    """`cold`: no kernel was compiled before."""

    warm_sessions: int
    cold: bool

    @property
    def name(self) -> str:
        cache = "cold" if self.cold else "warm"
        return f"warm_sessions {self.warm_sessions}, kernels {cache}"


@dataclass(frozen=True)
class Counts:
    """Kernels in Triton's cache, and captures that the services' logs tell of."""

    kernels: int
    graphs: int

    @staticmethod
    def of(cache: Path, services: Sequence[Child]) -> Counts:
        logs = "".join(child.log.read_text("utf-8", errors="replace") for child in services)
        return Counts(len([*cache.rglob("*.cubin")]), logs.count("captured the"))

    def since(self, before: Counts) -> str:
        kernels, graphs = self.kernels - before.kernels, self.graphs - before.graphs
        return f"{kernels} kernels compiled, {graphs} graphs captured"


def run(case: Case, options: argparse.Namespace, cache: Path) -> None:
    if case.cold:
        shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(exist_ok=True)
    with Services(options.start_s, {"TRITON_CACHE_DIR": str(cache)}) as services:
        before, began = Counts.of(cache, ()), time.monotonic()
        begun = [services.begin(module, module, flags) for module, flags in _workers(case, options)]
        for child in begun:
            services.ready(child)
            say(f"  {child.name} serves after {time.monotonic() - began:.1f} s")
        at_start = Counts.of(cache, begun)
        say(f"  until then: {at_start.since(before)}")
        flags = [f for c in begun for f in (f"--{c.name}", c.address)]
        coordinator = services.ready(services.begin("coordinator", "coordinator", flags))
        asyncio.run(workers_of(coordinator.address, 2))
        for method in ("plain", "dflash"):
            for count in options.sessions:
                told = asyncio.run(_ask(coordinator, method, count, options))
                say(f"  {method:<6} x {count}: {told}")
        say(f"  behind it: {Counts.of(cache, begun).since(at_start)}")


def _workers(case: Case, options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    warm = ["--warm-sessions", str(case.warm_sessions)]
    target = ["--model", options.model, *options.target_flags.split(), *warm]
    if options.colocate:
        beside = ["--colocate", "dflash", "--draft-checkpoint", options.draft]
        yield "target_svc", [*target, *beside]
        return
    described = DraftTarget(options.model, torch.bfloat16).described
    draft = parse_draft(read_json(Path(options.draft, "config.json")), described, "dflash")
    yield "target_svc", [*target, "--warm-taps", ",".join(map(str, draft.tap_ids))]
    own = ["--methods", "dflash", "--draft", options.draft, "--target", options.model]
    yield "draft_svc", [*own, *options.draft_flags.split(), *warm]


async def _ask(coordinator: Child, method: str, count: int, options: argparse.Namespace) -> str:
    rng = random.Random(count)
    prompts = [[rng.randrange(20, 90) for _ in range(options.prompt_tokens)] for _ in range(count)]
    asked: Asked = {"method": method, "max_tokens": options.max_tokens, "ignore_eos": True}
    asked |= {"temperature": 0.0, "return_token_ids": True}
    if method != "plain":
        asked["num_speculative_tokens"] = options.k
    async with AsyncClient(coordinator.address) as client:
        began = time.perf_counter()
        streams = await asyncio.gather(
            *(session(client, asked | {"token_ids": ids}) for ids in prompts)
        )
    return _told(streams, began)


def _told(streams: Sequence[Stream], began: float) -> str:
    first = max(stream.arrivals[0][0] for stream in streams) - began
    gaps = [
        1e3 * (after[0] - before[0])
        for stream in streams
        for before, after in pairwise(stream.arrivals[: FIRST + 1])
    ]
    longest, median = max(gaps, default=0.0), statistics.median(gaps or [0.0])
    return (
        f"first tokens after {1e3 * first:.0f} ms, longest of the first {FIRST} gaps "
        f"{longest:.1f} ms, median {median:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", default="", help="directory of the target")
    add("--draft", default="", help="directory of a dflash draft for it")
    add(
        "--shape",
        choices=sorted(SHAPES),
        default="smollm2-135m",
        help="of a pair that is written",
    )
    add("--device", default="cuda", help="where the pair is written")
    add("--colocate", action="store_true", help="the draft in the target's process")
    add("--sessions", default="1,4", help="sessions at once, one count after the other")
    add("--prompt-tokens", type=int, default=300)
    add("--max-tokens", type=int, default=48)
    add("--k", type=int, default=7)
    add("--warm-sessions", type=int, default=8)
    add("--cold-off", action="store_true", help="also cold kernels that sessions wait for")
    add("--target-flags", default="", help="more flags of the target")
    add("--draft-flags", default="", help="more flags of the draft service")
    add("--start-s", type=float, default=400)
    options = parser.parse_args()
    options.sessions = [int(count) for count in options.sessions.split(",")]
    cases = [Case(options.warm_sessions, True), Case(options.warm_sessions, False), Case(0, False)]
    cases += [Case(0, True)] if options.cold_off else []
    with tempfile.TemporaryDirectory(prefix="specwire-warm-") as folder:
        if not options.model:
            write_pair(Path(folder, "pair"), options.shape, options.device)
            options.model, options.draft = (f"{folder}/pair/{n}" for n in ("target", "dflash"))
        for case in cases:
            say(case.name)
            try:
                run(case, options, Path(folder, "kernels"))
            except (NotStarted, SpecwireError) as error:
                say(f"  failed: {error}")


if __name__ == "__main__":
    main()
