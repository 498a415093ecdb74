"""`specwire backends` for readers: tables and lines."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.attention.asked import Pairing
from engine.attention.listing import HEADER, listing
from engine.attention.matrix import Cell
from engine.attention.outcome import Outcome

_FILE_WIDTH = 140


def console() -> Console:
    """Wide where nobody looks: in files and pipes."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=_FILE_WIDTH)


def show_pairings(console: Console, pairings: Sequence[Pairing]) -> None:
    for pairing in pairings:
        if pairing.target is not None:
            _show(console, pairing.target)
        _show(console, pairing.outcome)


def _show(console: Console, outcome: Outcome) -> None:
    label, request = outcome.request.label, outcome.request
    name = f" ({request.shape.name})" if request.shape.name else ""
    console.print(f"{label}{name} on {outcome.device}", style="bold", markup=False)
    for line in _lines(outcome):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    console.print(_candidates(outcome))


def _lines(outcome: Outcome) -> list[str]:
    resolution, refusal = outcome.resolution, outcome.refusal
    if refusal is not None:
        return [f"refused: {refusal.problem} ({refusal.described})"]
    assert resolution is not None
    kv, graphs, request = resolution.geometry, resolution.graphs, resolution.request
    layer = f"{kv.token_bytes} bytes a token and layer" if kv.token_bytes else "size not declared"
    lines = [
        f"attention: {resolution.chosen} ({resolution.policy})",
        f"KV: {kv.dtype}, {layer}, {kv.page_tokens} tokens a page, {request.kv_group.value}",
        f"CUDA graphs: {graphs.mode} (level {graphs.level.name}, {request.query_tokens} query "
        "tokens a request)",
    ]
    if request.dcp > 1:
        how = "split over the ranks" if request.sharded else "whole on every rank"
        lines.append(f"decode context parallelism: {request.dcp}, KV {how}")
    if len(resolution.groups) > 1:
        for group in resolution.groups:
            layers = ", ".join(map(str, group.layers))
            lines.append(f"layers {layers}: {group.mode}: {group.chosen}")
    return lines + list(resolution.notes)


def _candidates(outcome: Outcome) -> Table:
    found = outcome.resolution or outcome.refusal
    assert found is not None
    table = Table(show_header=True, box=None, padding=(0, 2))
    table.add_column("backend", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for candidate in found.candidates:
        chosen = candidate.name in outcome.chosen.split("+")
        verdict = "chosen" if chosen else "; ".join(candidate.reasons) or "valid"
        table.add_row(candidate.name, Text(verdict))  # reasons hold brackets
    return table


def show_matrix(console: Console, device: str, cells: Sequence[Cell]) -> None:
    """A row for each pairing: what each role takes, and how much of it is a full graph."""
    table = Table(title=f"targets and drafts on {device}", title_justify="left", box=None)
    for header in ("target", "its backend", "draft", "as a service", "in its process"):
        table.add_column(header, overflow="fold")
    before = ""
    for cell in cells:
        first = cell.target != before
        table.add_row(
            cell.target if first else "",
            _cell(cell.beside) if first else "",
            cell.draft,
            _cell(cell.separate),
            _cell(cell.colocated),
        )
        before = cell.target
    console.print(table)
    console.print("In brackets: CUDA graphs of decode steps. --json has all reasons.", markup=False)


def _cell(outcome: Outcome) -> str:
    if outcome.resolution is None:
        return "refused"
    return f"{outcome.chosen} ({outcome.resolution.graphs.decode})"


def show_list(console: Console) -> None:
    """A paragraph for each backend: the table has too many columns for a terminal."""
    for name, *values in listing():
        console.print(name, style="bold")
        for header, value in zip(HEADER[1:], values, strict=True):
            if not value:
                continue
            console.print(f"  {header}: {value}", markup=False, highlight=False, soft_wrap=True)
