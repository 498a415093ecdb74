"""One stream's messages: written one at a time, and begun at once where somebody hurries.

To wake a task that writes takes another turn of the event loop, behind everything else that is due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Begun:
    """A coroutine that has run as far as it came without waiting. Whoever awaits it goes on with
    it, and is told of what it raises."""

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._waits_for: Any = None
        self._over = False
        try:
            self._waits_for = work.send(None)
        except StopIteration:
            self._over = True
        except (Exception, asyncio.CancelledError) as error:  # not for whoever began it
            self._error, self._over = error, True

    def __await__(self) -> Generator[Any, Any, None]:
        if self._error is not None:
            raise self._error
        while not self._over:
            thrown: BaseException | None = None
            try:
                yield self._waits_for
            except BaseException as error:  # a cancel belongs to the coroutine
                thrown = error
            try:
                work = self._work
                self._waits_for = work.send(None) if thrown is None else work.throw(thrown)
            except StopIteration:
                self._over = True

    def close(self) -> None:
        self._work.close()


class Writer(Generic[T]):
    """`following` makes a message of all that waits, or is None; it is asked when the message
    before is written."""

    def __init__(
        self, write: Callable[[T], Coroutine[Any, Any, None]], following: Callable[[], T | None]
    ) -> None:
        self._write, self._following = write, following
        self._begun: Begun | None = None
        self._idle = self._closed = False
        self._changed = asyncio.Event()

    @property
    def _free(self) -> bool:
        return self._idle and self._begun is None

    def wake(self) -> None:
        """Something waits."""
        self._changed.set()

    def hurry(self) -> None:
        """Something waits, and nothing more will soon: it is written before this returns, unless a
        message is being written."""
        if self._free and (message := self._following()) is not None:
            self.begin(message)
        self._changed.set()

    def begin(self, message: T) -> bool:
        """Writes a message in front of all that waits. False: another is being written."""
        if not self._free:
            return False
        self._begun = Begun(self._write(message))
        self._changed.set()
        return True

    def close(self) -> None:
        """Ends `run` once all is written."""
        self._closed = True
        self._changed.set()

    async def run(self) -> None:
        """Raises what writing raised."""
        try:
            while True:
                if self._begun is not None:
                    await self._begun
                    self._begun = None
                elif (message := self._following()) is not None:
                    await self._write(message)
                elif self._closed:
                    return
                else:
                    await self._wait()
        finally:
            if self._begun is not None:
                self._begun.close()

    async def _wait(self) -> None:
        self._changed.clear()
        self._idle = True
        try:
            await self._changed.wait()
        finally:
            self._idle = False
