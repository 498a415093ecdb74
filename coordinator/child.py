"""Starts one service so that it cannot outlive the process that started it.

`python -m coordinator.child PARENT_PID MODULE [FLAGS...]` asks the kernel for a SIGTERM when the
parent dies, then becomes `python -m MODULE`. Done here and not between fork and exec, where a
process with threads may run almost nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    parent, module, *flags = argv
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before the request was in place
        raise SystemExit(1)
    os.execv(sys.executable, [sys.executable, "-m", module, *flags])


if __name__ == "__main__":
    main(sys.argv[1:])
