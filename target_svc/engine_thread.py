"""The thread that the engine lives on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar, TypeVarTuple

Result = TypeVar("Result")
Args = TypeVarTuple("Args")
Job = tuple["asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...]]


class EngineThread:
    """Runs what an event loop asks for, one call after another.

    As an executor of one thread, without the futures of its own that make each call 50 us dearer
    on a busy machine.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[*Args], Result], *args: *Args) -> asyncio.Future[Result]:
        """Of what the function returns or raises. One that is cancelled runs all the same."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._jobs.put((future, function, args))
        return future

    def close(self, wait: bool = True) -> None:
        """Returns when all calls are over, unless told not to `wait` for them. Safe to repeat."""
        self._jobs.put(None)
        if wait:
            self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function, args = job
            del job
            result, error = None, None
            try:
                result = function(*args)
            except BaseException as raised:  # it belongs to whoever asked
                error = raised
            loop = future.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future, result, error)
            # Nothing of a step stays alive until the next one.
            del future, function, args, result, error


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
