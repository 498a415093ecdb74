"""A stream's messages: one at a time, in order, and at once where somebody hurries."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from specwire.writer import Writer


class Stream:
    """Writes wait for the gate; all that waits is one message."""

    def __init__(self) -> None:
        self.begun: list[list[str]] = []
        self.written: list[list[str]] = []
        self.cancelled = False
        self.gate = asyncio.Event()
        self.waiting: list[str] = []
        self.error: BaseException | None = None
        self.writer = Writer(self._write, self._following)

    async def _write(self, message: list[str]) -> None:
        self.begun.append(message)
        if self.error is not None:
            raise self.error
        try:
            await self.gate.wait()
            await asyncio.sleep(0)  # more than one wait
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        self.written.append(message)

    def _following(self) -> list[str] | None:
        taken, self.waiting = self.waiting, []
        return taken or None


async def running(stream: Stream) -> asyncio.Task[None]:
    task = asyncio.create_task(stream.writer.run())
    await asyncio.sleep(0)
    return task


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_who_hurries_writes_at_once() -> None:
    stream = Stream()
    task = await running(stream)
    stream.waiting = ["a", "b"]
    stream.writer.hurry()
    assert stream.begun == [["a", "b"]], "before anything else has a turn"
    stream.gate.set()
    await asyncio.sleep(0.01)
    assert stream.written == [["a", "b"]]
    stream.waiting = ["c"]
    stream.writer.wake()
    assert len(stream.begun) == 1
    await asyncio.sleep(0.01)
    assert stream.written == [["a", "b"], ["c"]]
    await ended(task)


async def test_one_message_at_a_time() -> None:
    stream = Stream()
    task = await running(stream)
    for name in "abc":
        stream.waiting.append(name)
        stream.writer.hurry()
    await asyncio.sleep(0.01)
    stream.writer.hurry()
    assert stream.begun == [["a"]]
    stream.gate.set()
    await asyncio.sleep(0.01)
    assert stream.written == [["a"], ["b", "c"]]
    await ended(task)


async def test_it_ends_once_all_is_written() -> None:
    stream = Stream()
    task = await running(stream)
    stream.waiting = ["a"]
    stream.writer.hurry()
    stream.waiting = ["b"]
    stream.writer.close()
    await asyncio.sleep(0.01)
    assert not task.done()
    stream.gate.set()
    await asyncio.wait_for(task, 1)
    assert stream.written == [["a"], ["b"]]


async def test_before_it_runs_nothing_is_written() -> None:
    stream = Stream()
    stream.gate.set()
    stream.waiting = ["a"]
    stream.writer.hurry()
    assert not stream.begun
    task = await running(stream)
    await asyncio.sleep(0.01)
    assert stream.written == [["a"]]
    await ended(task)


async def test_a_cancel_reaches_what_was_begun() -> None:
    stream = Stream()
    task = await running(stream)
    stream.waiting = ["a"]
    stream.writer.hurry()
    await asyncio.sleep(0.01)
    await ended(task)
    assert stream.cancelled and task.cancelled()


@pytest.mark.parametrize("hurried", [True, False])
async def test_what_writing_raises_ends_it(hurried: bool) -> None:
    stream = Stream()
    task = await running(stream)
    stream.error, stream.waiting = RuntimeError("broken"), ["a"]
    if hurried:
        stream.writer.hurry()  # it is for whoever runs it
    else:
        stream.writer.wake()
    with pytest.raises(RuntimeError, match="broken"):
        await asyncio.wait_for(task, 1)


async def test_a_cancel_that_writing_begins_with_is_not_for_who_hurries() -> None:
    """As of a call that was given up on this side."""
    stream = Stream()
    task = await running(stream)
    stream.error, stream.waiting = asyncio.CancelledError(), ["a"]
    stream.writer.hurry()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 1)
