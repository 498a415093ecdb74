"""The closed loop: only what all sessions share counts; a random pair is served and measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.bench_modes import Mode
from specwire.generation import Acceptance
from tests.load.random_pair import write_pair
from tests.load.session_clients import Stream
from tests.load.sessions import cell, command, table

DRAFT = Mode("dflash", "dflash", "exact")
PLAIN = Mode("plain", "plain", "exact")


def stream(arrivals: list[tuple[float, int]], drafted: list[int], outside: list[int]) -> Stream:
    record = Acceptance(
        rounds=len(drafted),
        per_step_drafted=tuple(drafted),
        per_step_outside_us=tuple(outside),
    )
    return Stream(tuple(arrivals), record)


def test_only_the_time_that_all_sessions_share_counts() -> None:
    one = stream([(0.0, 1), (1.0, 3), (2.0, 3), (3.0, 1)], [7, 7, 0], [500, 700, 90])
    two = stream([(1.5, 1), (2.0, 2), (2.5, 4)], [7, 7], [900, 800])
    found = cell(DRAFT, [[one, two]], None)
    # From 1.5 to 2.5 s: 3 of the first session, 2 + 4 of the second.
    assert found.tokens_per_s == 9.0 and not found.synthetic
    assert found.tau == round(13 / 5, 3) and (found.k, found.drafted) == (5.6, 0.8)
    assert found.round_ms == pytest.approx(2.6 * 2 / 9 * 1e3, abs=1e-3)
    assert found.outside_ms == 0.75  # of the rounds that drafted
    made_up = cell(DRAFT, [[one, two]], 4.0)
    assert made_up.synthetic and made_up.tau == 4.0 and made_up.round_ms == found.round_ms
    assert made_up.tokens_per_s == round(4.0 * 2 / made_up.round_ms * 1e3, 1)
    assert cell(PLAIN, [[one, two]], 4.0).synthetic is False
    twice = cell(DRAFT, [[one, two], [two, one]], None)
    assert (twice.sessions, twice.tokens_per_s, twice.round_ms) == (2, 9.0, found.round_ms)
    late = stream([(4.0, 1), (5.0, 1)], [7], [500])
    with pytest.raises(RuntimeError, match="--max-tokens"):
        cell(DRAFT, [[one, late]], None)


@pytest.mark.parametrize("clients", [1, 2])
def test_a_random_pair_in_running_services(
    clients: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.load.sessions.SESSIONS", 2)
    write_pair(tmp_path / "pair", "tiny")
    pair, report = tmp_path / "pair", tmp_path / "report.json"
    status = command(
        f"--model {pair}/target --draft {pair}/dflash --set draft.dspark={pair}/dspark "
        "--set draft.methods=dflash,dspark --sessions 1,3 --modes plain,dflash,dspark "
        f"--k 7 --tau 4 --prompt-tokens 20 --max-tokens 400 --settle 0 --turns 1 --json {report} "
        f"--clients {clients}".split()
    )
    assert status == 0
    cells = json.loads(report.read_text())
    assert [(c["mode"], c["sessions"], c["synthetic"]) for c in cells] == [
        (mode, count, mode != "plain") for count in (1, 3) for mode in ("plain", "dflash", "dspark")
    ]
    assert all(c["tokens_per_s"] > 0 and (c["k"] > 0) is c["synthetic"] for c in cells)
    assert "| sessions | plain | dflash | dspark |" in capsys.readouterr().out


def test_the_table_compares_with_plain() -> None:
    one = stream([(0.0, 1), (1.0, 4), (2.0, 4)], [3, 3], [500, 500])
    cells = [cell(mode, [[one]], None) for mode in (PLAIN, DRAFT)]
    assert table(cells).splitlines()[-1] == "| 1 | 4 | 4 (1.00 x) |"
