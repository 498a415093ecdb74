"""A service as a process: its event loop, its signals, and a start that may be given up. Needs
`serve`."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import uvloop

from specwire.errors import SpecwireError


def run_service(main: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    """Runs a service on uvloop until its coroutine ends; SIGTERM and SIGINT set the event."""

    async def supervised() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await main(stop)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(supervised())
    except SpecwireError as error:
        # Unclipped: this is the process's own terminal, and a refusal lists every reason.
        print(f"error: {error.args[0]}", file=sys.stderr)
        sys.exit(2)


async def started(stop: asyncio.Event, start: Coroutine[Any, Any, object]) -> bool:
    """Whether the start came to its end before the stop. One that did not is cancelled: weights
    take minutes to load, and nobody is served yet. Raises what the start raises."""
    starting = asyncio.ensure_future(start)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            return True
        with suppress(OSError):  # nobody reads it any more
            print("stopped while it was starting", file=sys.stderr)
        return False
    finally:
        for task in (starting, stopping):
            task.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
