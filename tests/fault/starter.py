"""Starts services quickly: a process that has imported them forks one child for each start.

    python -m tests.fault.starter

A line in: {"module", "argv", "environment", "output"}. A line out: the exit status. A child runs
`python -m MODULE` as far as anyone can tell, without the seconds that importing torch takes.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

_LIMIT_S = 15
_SLOW_IMPORTS = ("coordinator.host", "draft_svc.settings", "target_svc.engines.native")
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    status: int
    output: str

    @property
    def last_line(self) -> str:
        return self.output.strip().rpartition("\n")[2]


class Starter:
    """A context manager around the forking process."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def __enter__(self) -> Self:
        path = f"{_ROOT / 'proto'}:{_ROOT}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fault.starter"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            cwd=_ROOT,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate(timeout=30)

    def run(self, module: str, *argv: str, environment: Mapping[str, str] | None = None) -> Ended:
        """Runs a service that is expected to end by itself: exit status, stdout and stderr."""
        self._count += 1
        output = self._folder / f"{self._count}.log"
        order = {
            "module": module,
            "argv": argv,
            "environment": dict(environment or {}),
            "output": str(output),
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        return Ended(int(answer), output.read_text())


def _child(module: str, argv: Sequence[str], environment: Mapping[str, str], output: str) -> None:
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # One that starts after all is ended: the test then sees -SIGALRM where it wants 2.
    signal.alarm(_LIMIT_S)
    os.environ.update(environment)
    sys.argv = [module, *argv]
    status = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _serve() -> None:
    for name in _SLOW_IMPORTS:
        importlib.import_module(name)
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            order = json.loads(line)
            _child(order["module"], order["argv"], order["environment"], order["output"])
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
