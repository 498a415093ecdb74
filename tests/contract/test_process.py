"""A service's process: told to stop it ends soon, with status 0 and a word."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest

from specwire.errors import Reason, SpecwireError
from specwire.process import started

# A signal that comes while the service's libraries load: here where it asks for the first of them.
STOPPED = """
import os, runpy, signal, sys

class Terminate:
    def find_spec(self, name, path=None, target=None):
        if name in ("grpc", "torch"):
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Terminate())
sys.argv = [sys.argv[1]]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
LEFT = """
import atexit, time
from specwire.environment import leave
atexit.register(time.sleep, 20)
print("done")
leave()
"""
# The import is one that catches what is raised within it.
UNREAD = """
import os, signal, sys
from contextlib import suppress
from specwire.environment import leave, prepare
prepare()
if sys.argv[1] == "early":
    with suppress(OSError):
        os.kill(os.getpid(), signal.SIGTERM)
else:
    sys.stdout = open(1, "w")  # buffered, whatever the environment says
    sys.stdout.write("x")
    leave()
sys.exit(3)
"""


def run(program: str, *argv: str) -> tuple[int, str, str]:
    command = [sys.executable, "-c", program, *argv]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=15)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("module", ["target_svc", "draft_svc", "coordinator"])
def test_a_stop_while_libraries_load(module: str) -> None:
    assert run(STOPPED, module) == (0, "", "stopped while it was starting\n")


def test_nothing_is_taken_apart_at_the_end() -> None:
    assert run(LEFT) == (0, "done\n", "")


@pytest.mark.parametrize("when", ["early", "late"])
def test_a_stop_where_nobody_reads_what_is_said(when: str) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as closed:
        ended = subprocess.run([sys.executable, "-c", UNREAD, when], stdout=closed, stderr=closed)
    assert ended.returncode == 0


async def test_a_start_that_takes_long_is_given_up(capsys: pytest.CaptureFixture[str]) -> None:
    stop, begun = asyncio.Event(), asyncio.Event()

    async def start() -> None:
        begun.set()
        await asyncio.sleep(60)

    waiting = asyncio.ensure_future(started(stop, start()))
    await begun.wait()
    stop.set()
    before = time.monotonic()
    assert not await waiting
    assert time.monotonic() - before < 1
    assert capsys.readouterr().err == "stopped while it was starting\n"


async def test_what_a_start_raises_is_raised() -> None:
    async def fail() -> None:
        raise SpecwireError(Reason.CHECKPOINT_INVALID, "the checkpoint has no layer 3")

    async def succeed() -> None:
        pass

    with pytest.raises(SpecwireError, match="no layer 3"):
        await started(asyncio.Event(), fail())
    assert await started(asyncio.Event(), succeed())
