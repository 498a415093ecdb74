"""The folder of a deployment: its own while it lives, removed by the next where it was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.own_folder import OwnFolder

_KILLED = """
import os, signal
from coordinator.own_folder import OwnFolder
folder = OwnFolder()
print(folder.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_deployment_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "specwire-of-something-else").mkdir()
    first = OwnFolder()
    killed = subprocess.run([sys.executable, "-c", _KILLED], capture_output=True, text=True)
    left = Path(killed.stdout.strip())
    assert left.is_dir() and left.parent == tmp_path and first.path.is_dir()
    (left / "target_svc.log").write_text("x")
    second = OwnFolder()
    assert not left.exists() and first.path.is_dir() and second.path.is_dir()
    first.remove()
    second.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["specwire-of-something-else"]
