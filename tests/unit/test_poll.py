"""Polling instead of sleeping, for a while."""

from __future__ import annotations

import asyncio

import pytest

from specwire import poll
from specwire.poll import BusyPoll


async def turns_within(seconds: float) -> int:
    """How often the loop came round by itself meanwhile."""
    loop = asyncio.get_running_loop()
    before, counted = loop.time(), 0
    ran_once = loop._run_once  # type: ignore[attr-defined]

    def run_once() -> None:
        nonlocal counted
        counted += 1
        ran_once()

    loop._run_once = run_once  # type: ignore[attr-defined]
    await asyncio.sleep(seconds)
    assert loop.time() - before >= seconds
    return counted


async def test_the_loop_comes_round_until_the_time_is_over() -> None:
    busy = BusyPoll(200_000)
    busy.begin()
    busy.begin()
    assert await turns_within(0.3) > 100
    assert await turns_within(0.05) < 10
    busy.begin()
    assert await turns_within(0.1) > 100  # again


async def test_an_end_and_no_beginning() -> None:
    busy = BusyPoll(10_000_000)
    busy.begin()
    busy.end()
    assert await turns_within(0.02) < 10
    BusyPoll(0).begin()
    assert await turns_within(0.02) < 10


async def test_messages_are_read_meanwhile() -> None:
    busy = BusyPoll(5_000_000)
    busy.begin()
    loop, heard = asyncio.get_running_loop(), asyncio.Event()
    loop.run_in_executor(None, lambda: loop.call_soon_threadsafe(heard.set))
    await asyncio.wait_for(heard.wait(), 4)


def test_unset_it_depends_on_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, wanted in ((2, 0.0), (8, 0.01)):
        monkeypatch.setattr(poll.os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        assert BusyPoll(None)._longest_s == wanted
        assert BusyPoll(0)._longest_s == 0.0 and BusyPoll(2500)._longest_s == 0.0025
