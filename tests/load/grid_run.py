"""Runs a grid: the same prompts at each target without a draft, then with each draft."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from coordinator.local import Child
from specwire.client import AsyncClient
from specwire.errors import SpecwireError
from specwire.generation import Generation
from specwire.info import WorkerState
from specwire.request import GenerateOptions
from tests.load.grid_services import NotStarted, Services

Say = Callable[[str], None]
_CLIPPED = 80


@dataclass(frozen=True)
class Side:
    """A service of the grid: what it is called, and its own flags."""

    name: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grid:
    """`coordinator`: flags of its own. `prompts` are arguments of `generate` without a method; each
    is run in turn, with `k` draft tokens a round."""

    targets: Sequence[Side]
    drafts: Sequence[Side]
    coordinator: tuple[str, ...]
    prompts: Sequence[GenerateOptions]
    method: str
    k: int
    start_s: float = 180.0
    environment: dict[str, str] | None = None


@dataclass(frozen=True)
class Texts:
    """What one pair gave; the rate is that of decoding, first tokens and a first run left out."""

    generations: tuple[Generation, ...]
    tokens_per_s: float

    @property
    def ids(self) -> list[tuple[int, ...]]:
        return [generation.token_ids for generation in self.generations]


@dataclass(frozen=True)
class Row:
    """A line of the table. `wrong`: a text differs from that of the target alone, or a service
    failed in the middle; `found` says what."""

    target: str
    draft: str
    found: str
    target_runs: str = ""
    draft_runs: str = ""
    tokens_per_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    wrong: bool = False


def run_grid(grid: Grid, say: Say) -> list[Row]:
    """All services start side by side; then one pair after the other has the machine."""
    rows: list[Row] = []
    with Services(grid.start_s, grid.environment) as services:
        begun = [
            [(side.name, services.begin(module, f"{module[0]}{at}", side.flags))
             for at, side in enumerate(sides)]
            for module, sides in (("draft_svc", grid.drafts), ("target_svc", grid.targets))
        ]  # fmt: skip
        drafts, targets = (dict(_ready(services, started, say)) for started in begun)
        first: tuple[str, Texts] | None = None
        for name, target in targets.items():
            if isinstance(target, str):
                rows.append(Row(name, "-", f"refused: {target}"))
                say(line(rows[-1]))
                continue
            alone, texts = _pair(services, grid, name, target, "none", None, None)
            if texts is not None and first is not None:
                other = _difference(services, grid, target, texts, first[1])
                say(f"{name} against {first[0]}, both without a draft: {other or 'identical'}")
            first = first or (None if texts is None else (name, texts))
            paired = _drafted(services, grid, name, target, drafts, texts)
            for row in chain((alone,), paired):
                say(line(row))
                rows.append(row)
    return rows


def _ready(
    services: Services, begun: Sequence[tuple[str, Child]], say: Say
) -> Iterator[tuple[str, Child | str]]:
    """Those that serve; the reason where one cannot be had."""
    for name, child in begun:
        try:
            yield name, services.ready(child)
        except NotStarted as error:
            say(f"{child.name} {name}: refused: {error}")
            yield name, str(error)


def _drafted(
    services: Services,
    grid: Grid,
    name: str,
    target: Child,
    drafts: dict[str, Child | str],
    plain: Texts | None,
) -> Iterator[Row]:
    for draft, child in drafts.items():
        if isinstance(child, str):
            yield Row(name, draft, f"refused: {child}")
        elif plain is not None:
            yield _pair(services, grid, name, target, draft, child, plain)[0]


def _pair(
    services: Services,
    grid: Grid,
    name: str,
    target: Child,
    draft_name: str,
    draft: Child | None,
    plain: Texts | None,
) -> tuple[Row, Texts | None]:
    """A coordinator for the two, all prompts, and what came of them."""
    flags = ["--target", target.address, *grid.coordinator]
    flags += ["--draft", draft.address] if draft is not None else []
    coordinator = services.begin("coordinator", f"c{time.monotonic_ns()}", flags)
    method = grid.method if draft is not None else "plain"
    try:
        services.ready(coordinator)
        workers = asyncio.run(_workers(coordinator.address, 1 + (draft is not None)))
        texts = asyncio.run(_generate(coordinator.address, grid, method))
    except (NotStarted, SpecwireError) as error:
        return Row(name, draft_name, f"failed: {error}", wrong=True), None
    finally:
        services.stop(coordinator)
    difference = _difference(services, grid, target, texts, plain) if plain else ""
    acceptances = [generation.acceptance for generation in texts.generations]
    drafted = sum(a.draft_tokens for a in acceptances)
    found = difference or ("identical" if plain else "")
    if draft is not None and not drafted:
        found = f"nothing was drafted: {[dict(a.fallbacks) for a in acceptances]}"
    return Row(
        target=name,
        draft=draft_name,
        found=found,
        target_runs=_runs(workers, "target"),
        draft_runs=_runs(workers, "draft"),
        tokens_per_s=texts.tokens_per_s,
        drafted=drafted,
        accepted=sum(a.accepted_tokens for a in acceptances),
        wrong=bool(difference) or (draft is not None and not drafted),
    ), texts


def _runs(workers: Sequence[WorkerState], role: str) -> str:
    """Backend, device and graph mode of a role, as it says itself."""
    found = [w for w in workers if w.role == role]
    return ", ".join(
        f"{w.attention.chosen} on {w.device.split()[0]}, graphs {w.attention.graph_mode}"
        for w in found
    )


async def _workers(address: str, count: int) -> tuple[WorkerState, ...]:
    """Once all are ready. Raises NotStarted."""
    deadline = time.monotonic() + 30
    async with AsyncClient(address) as client:
        while True:
            workers = (await client.info()).workers
            if len(workers) >= count and all(worker.state == "ready" for worker in workers):
                return workers
            if time.monotonic() > deadline:
                raise NotStarted("; ".join(f"{w.role} {w.state} {w.reason}" for w in workers))
            await asyncio.sleep(0.05)


async def _generate(address: str, grid: Grid, method: str) -> Texts:
    found: list[Generation] = []
    tokens, spent_ms = 0, 0.0
    async with AsyncClient(address) as client:
        for prompt in (grid.prompts[0], *grid.prompts):
            options: GenerateOptions = {**prompt, "method": method}
            if method != "plain":
                options["num_speculative_tokens"] = grid.k
            found.append(await client.generate(**options))
    for generation in found[1:]:
        tokens += len(generation.token_ids) - 1
        spent_ms += generation.acceptance.total_ms - generation.acceptance.ttft_ms
    return Texts(tuple(found[1:]), tokens / spent_ms * 1e3 if spent_ms else 0.0)


def _difference(services: Services, grid: Grid, target: Child, texts: Texts, others: Texts) -> str:
    """Where the first text that differs does, with the target's margin there; "" for nowhere."""
    for index, (own, other) in enumerate(zip(texts.ids, others.ids, strict=True)):
        if own == other:
            continue
        pairs = zip(own, other, strict=False)
        short = min(len(own), len(other))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), short)
        margin = _margin(services, grid, target, index, at)
        return f"differs at prompt {index}, token {at} (top-2 margin {margin})"
    return ""


def _margin(services: Services, grid: Grid, target: Child, index: int, at: int) -> str:
    """Of the target's own choice there, without a draft."""

    async def ask(address: str) -> tuple[float, ...]:
        options: GenerateOptions = {**grid.prompts[index], "method": "plain"}
        options["return_margins"] = True
        async with AsyncClient(address) as client:
            return (await client.generate(**options)).margins

    flags = ["--target", target.address, *grid.coordinator]
    coordinator = services.begin("coordinator", f"m{time.monotonic_ns()}", flags)
    try:
        margins = asyncio.run(ask(services.ready(coordinator).address))
    except (NotStarted, SpecwireError) as error:
        return f"unknown: {error}"
    finally:
        services.stop(coordinator)
    return f"{margins[at]:.4g}" if at < len(margins) else "unknown"


def line(row: Row) -> str:
    head = f"{row.target:24} {row.draft:24}"
    if not row.target_runs:
        return f"{head} {row.found[:_CLIPPED]}"  # all of a refusal was told when it was met
    acceptance = f", {row.accepted} of {row.drafted} accepted" if row.drafted else ""
    return (
        f"{head} {row.found or 'the reference':12} {row.tokens_per_s:8.1f} tok/s{acceptance}  "
        f"target {row.target_runs}; draft {row.draft_runs or 'none'}"
    )
