"""The grid of pairs itself: what counts as left out, what as wrong, and what is printed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.load import pairing_grid
from tests.load.grid_rows import Grid, Row, Side, left_out, line
from tests.load.grid_run import _lacking, run_grid
from tests.load.grid_services import NotStarted

REASON = "Attention backend FLASHINFER cannot run the target on cpu (" + 200 * "x" + ")"
GRID = Grid((), (), (), (), "dspark", 7)
PAIR = Row("T", "D", "identical", "T on cuda:0", "D on cuda:0", 100.0, 14, 5, graphs=(3, 2))


def test_a_refusal_is_left_out_once_with_its_whole_reason() -> None:
    refused = Row("FLASHINFER", "-", f"refused: {REASON}")
    rows = [refused, *(Row(name, "FLASHINFER", f"refused: {REASON}") for name in "AB"), PAIR]
    assert list(left_out(rows)) == [
        f"left out: target FLASHINFER: {REASON}",
        f"left out: draft FLASHINFER: {REASON}",
    ]
    assert len(line(refused)) < 140 < len(REASON)


def test_graphs_and_acceptance_are_in_the_line() -> None:
    assert "5 of 14 accepted" in line(PAIR)
    assert line(PAIR).endswith("graphs captured: 3 of steps, 2 of blocks")
    assert "graphs captured" not in line(replace(PAIR, graphs=(0, 0)))


@pytest.mark.parametrize(
    ("asked", "accepted", "graphs", "named"),
    [
        ({}, 0, (0, 0), ""),
        ({"captured": True}, 0, (1, 1), ""),
        ({"captured": True}, 0, (4, 0), "4 of steps, 0 of blocks"),
        ({"captured": True}, 0, (0, 4), "0 of steps, 4 of blocks"),
        ({"accepted": True}, 1, (0, 0), ""),
        ({"accepted": True}, 0, (4, 4), "nothing was accepted"),
    ],
)
def test_what_a_grid_asks_for(
    asked: dict[str, bool], accepted: int, graphs: tuple[int, int], named: str
) -> None:
    found = _lacking(replace(GRID, **asked), accepted, graphs)
    assert named in found and bool(found) == bool(named)


def test_what_is_not_ready_in_time_is_wrong_and_a_typed_refusal_is_not() -> None:
    """A backend that compiles for minutes must not look like one that cannot be had."""
    targets = (Side("slow"), Side("refused", ("--attention-backend", "FLASHINFER")))
    rows = run_grid(replace(GRID, targets=targets, start_s=0.0), lambda _: None)
    (slow, _) = rows
    assert slow.wrong and slow.found.startswith("failed: not ready within 0 s")
    rows = run_grid(replace(GRID, targets=targets[1:], start_s=60.0), lambda _: None)
    assert [row.wrong for row in rows] == [False]
    assert rows[0].found.startswith("refused: Attention backend FLASHINFER cannot run")
    assert NotStarted("gone").told == "failed: gone"


def test_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        pairing_grid.main(["--parts", "latnt"])
    assert "'latnt' is none of dense, reports, latent, latent-drafts" in capsys.readouterr().err
    asked = ["--backends", "FLASHINFER,TRITON_ATTN", "--drafts", "TORCH_SDPA", "--parts", "dense"]
    options = pairing_grid.parsed(asked)
    assert options.targets == ["FLASHINFER", "TRITON_ATTN"] and options.drafts == ["TORCH_SDPA"]
    assert "targets FLASH_ATTN, FLEX_ATTENTION, TORCH_SDPA" in pairing_grid.not_asked(options)
