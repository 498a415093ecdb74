"""Runs a grid: the same prompts at each target without a draft, then with each draft."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Literal

from coordinator.local import Child
from specwire.client import AsyncClient
from specwire.errors import SpecwireError
from specwire.info import WorkerState
from specwire.request import GenerateOptions
from tests.load.grid_asking import generate, workers_of
from tests.load.grid_rows import BESIDE, Grid, Row, Say, Side, Texts, line
from tests.load.grid_services import NotStarted, Services

_LONG_S = 60.0
# A draft of a pair: a service, or the one in the target's process; None: no draft.
Draft = Child | Literal["beside"] | None


def run_grid(grid: Grid, say: Say) -> list[Row]:
    """All services start side by side; then one pair after the other has the machine."""
    rows: list[Row] = []
    with Services(grid.start_s, grid.environment) as services:
        begun = [
            [(side, services.begin(module, f"{module[0]}{at}", side.flags))
             for at, side in enumerate(sides)]
            for module, sides in (("draft_svc", grid.drafts), ("target_svc", grid.targets))
        ]  # fmt: skip
        drafts, targets = (dict(_ready(services, started, say)) for started in begun)
        first: tuple[str, Texts] | None = None
        for side, target in targets.items():
            name = side.name
            if isinstance(target, NotStarted):
                rows.append(Row(name, "-", target.told, wrong=not target.typed))
                say(line(rows[-1]))
                continue
            alone, texts = _pair(services, grid, name, target, "none", None, None)
            if texts is not None and first is not None:
                other = _difference(services, grid, target, texts, first[1])
                say(f"{name} against {first[0]}, both without a draft: {other or 'identical'}")
            first = first or (None if texts is None else (name, texts))
            paired = _drafted(services, grid, side, target, drafts, texts)
            for row in chain((alone,), paired):
                say(line(row))
                rows.append(row)
    return rows


def _ready(
    services: Services, begun: Sequence[tuple[Side, Child]], say: Say
) -> Iterator[tuple[Side, Child | NotStarted]]:
    """Those that serve; the reason where one cannot be had."""
    for side, child in begun:
        began = time.monotonic()
        try:
            yield side, services.ready(child)
        except NotStarted as error:
            say(f"{child.name} {side.name}: {error.told}")
            yield side, error
        waited = time.monotonic() - began
        if waited > _LONG_S:
            say(f"{child.name} {side.name}: {waited:.0f} s more until it served")


def _drafted(
    services: Services,
    grid: Grid,
    side: Side,
    target: Child,
    drafts: dict[Side, Child | NotStarted],
    plain: Texts | None,
) -> Iterator[Row]:
    if side.beside:
        if plain is not None:
            yield _pair(services, grid, side.name, target, BESIDE, "beside", plain)[0]
        return
    for draft, child in drafts.items():
        if isinstance(child, NotStarted):
            yield Row(side.name, draft.name, child.told, wrong=not child.typed)
        elif plain is not None:
            yield _pair(services, grid, side.name, target, draft.name, child, plain)[0]


def _pair(
    services: Services,
    grid: Grid,
    name: str,
    target: Child,
    draft_name: str,
    draft: Draft,
    plain: Texts | None,
) -> tuple[Row, Texts | None]:
    """A coordinator for the two, all prompts, and what came of them."""
    flags = ["--target", target.address, *grid.coordinator]
    flags += ["--draft", draft.address] if isinstance(draft, Child) else []
    coordinator = services.begin("coordinator", f"c{time.monotonic_ns()}", flags)
    method = grid.method if draft is not None else "plain"
    try:
        services.ready(coordinator)
        workers = asyncio.run(workers_of(coordinator.address, 1 + (draft is not None)))
        texts = asyncio.run(generate(coordinator.address, grid, method))
    except (NotStarted, SpecwireError) as error:
        return Row(name, draft_name, f"failed: {error}", wrong=True), None
    finally:
        services.stop(coordinator)
    difference = _difference(services, grid, target, texts, plain) if plain else ""
    acceptances = [generation.acceptance for generation in texts.generations]
    drafted = sum(a.draft_tokens for a in acceptances)
    accepted = sum(a.accepted_tokens for a in acceptances)
    graphs = _captured([target, draft] if isinstance(draft, Child) else [target])
    problem = difference
    if draft is not None and not drafted:
        problem = f"nothing was drafted: {[dict(a.fallbacks) for a in acceptances]}"
    elif draft is not None and not problem:
        problem = _lacking(grid, accepted, graphs)
    return Row(
        target=name,
        draft=draft_name,
        found=problem or ("identical" if plain else ""),
        target_runs=_runs(workers, "target"),
        draft_runs=_runs(workers, "draft") if draft is not None else "",
        tokens_per_s=texts.tokens_per_s,
        drafted=drafted,
        accepted=accepted,
        wrong=bool(problem),
        graphs=graphs,
    ), texts


def _captured(children: Sequence[Child]) -> tuple[int, int]:
    """Graphs of steps and of blocks that the services say they captured."""
    told = "".join(child.log.read_text(encoding="utf-8", errors="replace") for child in children)
    return told.count("captured the step graph"), told.count("captured the block graph")


def _lacking(grid: Grid, accepted: int, graphs: tuple[int, int]) -> str:
    """What the grid asks of a pair whose text is right, and did not get; "" for nothing."""
    if grid.captured and not all(graphs):
        return f"identical, but graphs captured: {graphs[0]} of steps, {graphs[1]} of blocks"
    return "identical, but nothing was accepted" if grid.accepted and not accepted else ""


def _runs(workers: Sequence[WorkerState], role: str) -> str:
    """Backend, device, KV and graph mode of a role, as it says itself."""
    found = [w for w in workers if w.role == role]
    return ", ".join(
        f"{w.attention.chosen} on {w.device.split()[0]}, KV {w.attention.kv_dtype}, graphs "
        f"{w.attention.graph_mode}"
        for w in found
    )


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
