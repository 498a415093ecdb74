"""Runs the `check_*` functions of a module under Triton's interpreter, in a process of its own.

Triton decides when it is imported whether it interprets, so a test process cannot switch.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

from tests.engine.interpreter import prepare


def run(module: str, *only: str) -> dict[str, str]:
    """Name of every check of `module`, or of those named, and what went wrong, "" for nothing."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join((str(root / "proto"), str(root)))
    env = dict(os.environ, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=path)
    command = [sys.executable, "-m", "tests.engine.interpreted", module, *only]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    prepare()
    module, found = importlib.import_module(sys.argv[1]), {}
    names = sys.argv[2:] or [name for name in vars(module) if name.startswith("check_")]
    for name in names:
        start = time.monotonic()
        try:
            getattr(module, name)()
            found[name] = ""
            print(name, f"{time.monotonic() - start:.1f} s")
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
