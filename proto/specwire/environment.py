"""A service's process, from before its libraries load to its end. Call `prepare` before importing
anything else: it sets what grpc and torch read when they load, and a stop meanwhile is an orderly
end too."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

# gRPC's event engine reads on a pool of threads and hands over to the thread that the loop listens
# to; the older poller reads there: one wake-up less for each message, 0.17 against 0.28 ms for an
# exchange between two busy processes. Only for releases in which it was tried.
_POLLER_RELEASES = ((1, 76), (1, 85))
_POLLER = "-event_engine_client,-event_engine_listener"
# A service's event loop and its engine share the interpreter: by default the one that wants it
# waits up to 5 ms for the other, which is several steps of a small model on a GPU.
_SWITCH_S = 0.0005


def prepare() -> None:
    """Threads that wait must leave the cores to the others, and the interpreter soon. What the
    user has set in the environment stays. Until `run_service` takes over, SIGTERM and SIGINT end
    the process with status 0: as PID 1 of a container it would not even get them."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop_early)
    from importlib import metadata  # takes a while to load

    sys.setswitchinterval(_SWITCH_S)
    # A waiting OpenMP thread that spins makes a contended step take a hundred times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    release = tuple(int(part) for part in metadata.version("grpcio").split(".")[:2])
    if _POLLER_RELEASES[0] <= release <= _POLLER_RELEASES[1]:
        os.environ.setdefault("GRPC_EXPERIMENTS", _POLLER)


def loaded() -> None:
    """Call it once everything is loaded: what is there now stays, so the collector of cycles need
    not go through it again. With torch loaded each time would take some 100 ms, in the middle of a
    round."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or libraries would tell of leaks at the end


def leave() -> NoReturn:
    """Ends the process with status 0, at once: to take torch apart first takes the interpreter up
    to two seconds, and the system frees memory and devices by itself. What a thread of it was
    writing stays half written: the next start removes that. For the end of `__main__` only."""
    try:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # nobody reads it any more
                stream.flush()
    finally:
        os._exit(0)


def _stop_early(number: int, frame: FrameType | None) -> NoReturn:
    # Not by an exception: it would pass through half-made imports, which may catch it. Nothing that
    # outlives the process is begun yet. Not by `print`: the signal may have come within one.
    try:
        os.write(2, b"stopped while it was starting\n")
    finally:  # where nobody reads it too
        os._exit(0)
