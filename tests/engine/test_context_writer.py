"""Rows of a draft's target are taken in by graphs of padded sizes as they are launch by launch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.engine import interpreted


@pytest.mark.timeout(300)
def test_rows_by_graphs_are_rows_by_launches() -> None:
    found = interpreted.run("tests.engine.context_checks")
    assert found == dict.fromkeys(
        ("check_heads", "check_latent", "check_no_memory_for_a_graph"), ""
    ), found


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_the_same_with_cuda_graphs() -> None:
    command = [sys.executable, "-m", "tests.engine.context_checks"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
