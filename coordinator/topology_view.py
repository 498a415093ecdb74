"""`specwire plan` for people: a table of rounds, one of memory, and the break-even in words."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from coordinator.footprint import Room
from coordinator.topology import Round, Work
from coordinator.topology_check import Predicted
from coordinator.topology_link import Link
from coordinator.topology_report import Report


def show(out: Console, report: Report, work: Work, link: Link, names: Sequence[str]) -> None:
    for name in names:
        out.print(name, markup=False, highlight=False)
    out.print(_rounds(report, work, link))
    for text in _words(report):
        out.print(text, markup=False, highlight=False, soft_wrap=True)
    if report.rooms:
        out.print(_memory(report.rooms))


_NOT_BOTH = (
    "nothing to predict: no drafter was measured in both places, of which each tells of the other\n"
    "  specwire bench --modes dflash,dflash@colocated --json FILE\n"
    "or give step times: --k, --plain-ms, --verify-ms, --draft-ms"
)


def show_check(out: Console, predicted: Sequence[Predicted]) -> None:
    if not predicted:
        out.print(_NOT_BOTH, markup=False, highlight=False)
        return
    table = Table(title="the cost model beside what was measured", title_justify="left")
    table.add_column("mode")
    table.add_column("with times of")
    for header in ("sessions", "K", "tau", "round ms", "model", "tok/s", "model", "off"):
        table.add_column(header, justify="right")
    for one in predicted:
        found = one.measured
        round_ms = 1e3 * found.sessions * found.tau / found.tokens_per_s
        cells = (found.k, found.tau, round_ms, one.round_ms)
        table.add_row(
            found.label,
            one.source,
            str(found.sessions),
            *(f"{cell:.2f}" for cell in cells),
            f"{found.tokens_per_s:.1f}",
            f"{one.tokens_per_s:.1f}",
            f"{100 * one.error:+.0f} %",
        )
    out.print(table)


def _rounds(report: Report, work: Work, link: Link) -> Table:
    sessions = "1 session" if work.batch == 1 else f"{work.batch} sessions"
    title = (
        f"{sessions}, round trip to the draft {link.rtt_ms:.2f} ms, "
        f"{link.bandwidth_gbit:g} Gbit/s, rows of {work.row_bytes:,} bytes"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("topology")
    for header in (
        "K",
        "tau",
        "verify",
        "draft",
        "exchanges",
        "rows",
        "round ms",
        "tok/s",
        "x plain",
    ):
        table.add_column(header, justify="right")
    for one in report.rounds:
        style = "bold" if one.topology == report.better else None
        table.add_row(*_cells(one, report.plain.tokens_per_s), style=style)
    return table


def _cells(one: Round, plain_speed: float) -> list[str]:
    name = f"{one.topology}, two halves in turn" if one.groups > 1 else one.topology
    parts = (one.verify_ms, one.draft_ms, one.exchanges_ms, one.rows_ms, one.cycle_ms)
    return [
        name,
        str(one.k),
        f"{one.tau:.2f}",
        *(f"{part:.2f}" for part in parts),
        f"{one.tokens_per_s:.1f}",
        f"{one.tokens_per_s / plain_speed:.2f}",
    ]


def _words(report: Report) -> list[str]:
    even, plain = report.even_with_colocated_ms, report.even_with_plain_ms
    return [
        f"better: {report.better}",
        "separate is slower than co-located at any round trip to the draft"
        if even is None
        else f"separate is faster than co-located below a round trip of {even:.2f} ms to the draft",
        "separate speculation does not pay at any round trip"
        if plain is None
        else f"separate speculation pays below a round trip of {plain:.2f} ms to the draft",
        *report.notes,
    ]


def _memory(rooms: Sequence[Room]) -> Table:
    table = Table(title="memory", title_justify="left")
    table.add_column("arrangement")
    for header in ("weights GB", "KV bytes a token", "tokens of context"):
        table.add_column(header, justify="right")
    for room in rooms:
        weights = f"{room.weights_bytes / 1e9:.2f}" if room.weights_bytes else "unknown"
        tokens = "unknown" if room.tokens is None else f"{room.tokens:,}"
        table.add_row(room.arrangement, weights, f"{room.kv_bytes:,}", tokens)
    return table
