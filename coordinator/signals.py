"""What signals do for the duration of a block."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def at_signals(act: Callable[[], object], *numbers: int) -> Iterator[None]:
    """Calls `act` where one of the signals comes; afterwards they do what they did before. Main
    thread only."""

    def handle(number: int, frame: FrameType | None) -> None:
        act()

    with _handled(handle, numbers):
        yield


@contextmanager
def terminated_cleanly() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP unwind the stack, so that children and sockets are removed."""
    with _handled(_unwind, (signal.SIGTERM, signal.SIGHUP)):
        yield


@contextmanager
def _handled(
    handler: Callable[[int, FrameType | None], None], numbers: tuple[int, ...]
) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
