"""Turns: few readers never wait; of many, a few read in each pass, in order, what is there then."""

from __future__ import annotations

import asyncio
import time

import pytest

from coordinator.mailbox import Mailbox
from coordinator.turns import AT_ONCE, Turns
from specwire.errors import Reason, SpecwireError


async def reader(mail: Mailbox, passes: list[int], into: list[tuple[int, int]]) -> None:
    """Reads once; notes the pass of the loop and how much there was to read."""
    await mail.get(None)
    count = 1
    while mail.take() is not None:
        count += 1
    into.append((passes[0], count))


async def counted(passes: list[int]) -> None:
    while True:
        await asyncio.sleep(0)
        passes[0] += 1


def boxes(count: int, may_wait: int, *, turns: Turns | None = None) -> list[Mailbox]:
    turns = turns or Turns()
    made = [Mailbox(turns) for _ in range(count)]
    for mail in made:
        mail.may_wait = may_wait
    return made


@pytest.mark.parametrize(("count", "may_wait"), [(AT_ONCE, 9), (5 * AT_ONCE, 0)])
async def test_few_readers_and_those_a_worker_waits_for_read_at_once(
    count: int, may_wait: int
) -> None:
    passes, found = [0], list[tuple[int, int]]()
    mails = boxes(count, may_wait)
    tasks = [asyncio.create_task(reader(mail, passes, found)) for mail in mails]
    counter = asyncio.create_task(counted(passes))
    await asyncio.sleep(0)
    for mail in mails:
        mail.put("a")
    await asyncio.gather(*tasks)
    counter.cancel()
    assert len({at for at, _ in found}) == 1


async def test_many_readers_take_turns_and_find_what_came_meanwhile() -> None:
    passes, found = [0], list[tuple[int, int]]()
    mails = boxes(4 * AT_ONCE, 9)
    tasks = [asyncio.create_task(reader(mail, passes, found)) for mail in mails]
    counter = asyncio.create_task(counted(passes))
    await asyncio.sleep(0)
    for mail in mails:
        mail.put("a")
    await asyncio.sleep(0)
    for mail in mails:
        mail.put("b")
    await asyncio.gather(*tasks)
    counter.cancel()
    by_pass: dict[int, list[int]] = {}
    for at, count in found:
        by_pass.setdefault(at, []).append(count)
    assert all(len(counts) <= AT_ONCE for counts in by_pass.values())
    assert [count for _, count in found[2 * AT_ONCE :]] == [2] * 2 * AT_ONCE


async def test_a_reply_that_ends_a_run_does_not_wait_for_its_turn() -> None:
    mails = boxes(3 * AT_ONCE, 1)
    last = mails[-1]
    waiting = [asyncio.ensure_future(mail.get(None)) for mail in mails]
    await asyncio.sleep(0)
    for mail in mails:
        mail.put("a")
    last.put("b")  # one more than may wait
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert waiting[-1].done() and not waiting[-2].done()
    await asyncio.gather(*waiting)


async def test_whoever_gave_up_its_turn_keeps_nobody_waiting() -> None:
    mails = boxes(3 * AT_ONCE, 9)
    waiting = [asyncio.ensure_future(mail.get(None)) for mail in mails]
    await asyncio.sleep(0)
    for mail in mails:
        mail.put("a")
    for task in waiting[AT_ONCE : 2 * AT_ONCE]:
        task.cancel()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert sum(isinstance(one, tuple) for one in found) == 2 * AT_ONCE


async def test_a_failed_link_and_a_passed_deadline_end_the_wait_for_a_turn() -> None:
    loop = asyncio.get_running_loop()
    mails = boxes(AT_ONCE + 2, 9)
    for mail in mails:
        mail.put("a")
    for mail in mails[:AT_ONCE]:
        assert await mail.get(None) is not None
    late, failed = mails[AT_ONCE:]
    failed.fail(SpecwireError(Reason.ENGINE_DOWN, "gone"))
    # What had come before is read all the same, and then nothing more.
    assert (await late.get(loop.time()))[1] == "a"  # type: ignore[index]
    assert (await failed.get(None))[1] == "a"  # type: ignore[index]
    assert await late.get(loop.time()) is None
    with pytest.raises(SpecwireError, match="gone"):
        await failed.get(None)


async def test_how_long_turns_were_waited_for_is_told() -> None:
    """By who waited, of each wait once: from when there was something to read until it was read."""
    told: list[float] = []
    mails = boxes(2 * AT_ONCE + 1, 9, turns=Turns(told.append))
    waiting = [asyncio.ensure_future(mail.get(None)) for mail in mails]
    await asyncio.sleep(0)
    for mail in mails:
        mail.put("a")
    asyncio.get_running_loop().call_soon(time.sleep, 0.02)
    await asyncio.gather(*waiting)
    waits = [mail.waited_ns for mail in mails]
    assert waits[:AT_ONCE] == [0] * AT_ONCE and min(waits[AT_ONCE:]) > 0.02e9
    assert told == [wait / 1e9 for wait in waits[AT_ONCE:]]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    mails[-1].put("b")
    assert await mails[-1].get(None) and not mails[-1].waited_ns and len(told) == AT_ONCE + 1
