"""The measurement of host work: every mode runs, and every thread is told of."""

from __future__ import annotations

import pytest

from tests.load.host_cost import MODES, command


@pytest.mark.slow
def test_every_mode_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--sessions", "2", "--seconds", "0.5"]) == 0
    told = capsys.readouterr().out
    for mode in MODES:
        assert f"{mode}, 2 sessions" in told
    for name in ("target engine", "target loop", "draft engine", "draft loop", "coordinator loop"):
        figures = [line for line in told.splitlines() if line.startswith(name + " ")]
        assert figures and all(float(line.split()[-1]) > 0 for line in figures)
