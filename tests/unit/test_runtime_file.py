"""Which deployment the commands find by themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator import runtime_file, up

# Publishes and is killed: nothing of it runs at its end.
KILLED = """
import os, signal, sys
from coordinator.runtime_file import published
with published("unix:/killed"):
    print(len(os.listdir(sys.argv[1])), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def _private_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_a_live_deployment_is_found() -> None:
    assert runtime_file.running_address() is None
    with runtime_file.published("unix:/x") as path:
        assert runtime_file.running_address() == "unix:/x"
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert runtime_file.running_address() is None and not list(path.parent.iterdir())


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_the_newest_one_is_found_and_then_the_one_that_is_left(
    first_ends_first: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = up._published("unix:/first"), up._published("unix:/second")
    assert first.__enter__() and not capsys.readouterr().err
    assert second.__enter__() and "unix:/first needs --address" in capsys.readouterr().err
    assert runtime_file.running_address() == "unix:/second"
    assert "--address" not in up._how_to_use("unix:/second", True)
    (ended, other), left = (first, second), "unix:/second"
    if not first_ends_first:
        (ended, other), left = (second, first), "unix:/first"
    ended.__exit__(None, None, None)
    assert runtime_file.running_address() == left
    other.__exit__(None, None, None)
    assert runtime_file.running_address() is None


def test_one_that_cannot_be_told_of_says_how_to_reach_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime_file.runtime_folder().mkdir()
    runtime_file.runtime_folder().chmod(0o777)
    with up._published("unix:/x") as by_itself:
        assert not by_itself and runtime_file.running_address() is None
        assert "specwire chat --address unix:/x\n" in up._how_to_use("unix:/x", by_itself)
    assert "other commands need --address" in capsys.readouterr().err


def test_a_file_that_others_can_write_is_not_believed() -> None:
    with runtime_file.published("unix:/x") as path:
        path.chmod(0o666)
        assert runtime_file.running_address() is None


def test_a_file_of_a_process_that_was_killed_is_not_believed() -> None:
    folder = runtime_file.runtime_folder()
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder)], capture_output=True, text=True, timeout=30
    )
    assert ended.stdout == "1\n" and len(list(folder.iterdir())) == 1
    assert runtime_file.running_address() is None and not list(folder.iterdir())


def test_a_broken_file_is_left_out() -> None:
    with runtime_file.published("unix:/x"), runtime_file.published("unix:/y") as path:
        path.write_text("{")
        assert runtime_file.running_address() == "unix:/x"


def test_what_one_left_that_was_killed_as_it_began_is_removed() -> None:
    folder = runtime_file.runtime_folder()
    folder.mkdir(mode=0o700)
    old, new = folder / "up-abcdefgh", folder / "up-ijklmnop"
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    with runtime_file.published("unix:/x") as path:
        assert set(folder.iterdir()) == {new, path}
