"""The engine's thread: one call after another, results and errors to whoever asked."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from target_svc.engine_thread import EngineThread


async def test_calls_run_in_order_on_one_thread() -> None:
    thread, seen = EngineThread(), list[int]()

    def note(number: int) -> int:
        seen.append(number)
        return threading.get_ident()

    found = await asyncio.gather(*(thread.call(note, i) for i in range(50)))
    assert seen == list(range(50))
    assert len(set(found)) == 1 and found[0] != threading.get_ident()
    thread.close()


async def test_an_error_is_the_askers_and_the_next_call_runs() -> None:
    thread = EngineThread()

    def fail() -> None:
        raise KeyError("scripted")

    with pytest.raises(KeyError, match="scripted"):
        await thread.call(fail)
    assert await thread.call(abs, -3) == 3
    thread.close()


async def test_one_that_nobody_waits_for_any_more_still_runs() -> None:
    thread, gate, ran = EngineThread(), threading.Event(), list[int]()
    held = thread.call(gate.wait, 10.0)
    given_up = thread.call(ran.append, 1)
    given_up.cancel()
    gate.set()
    assert await held
    await thread.call(ran.append, 2)
    assert ran == [1, 2]
    thread.close()
    thread.close()


async def test_nothing_of_a_call_stays_alive() -> None:
    class Big:
        pass

    thread, big = EngineThread(), Big()
    gone = weakref.ref(big)
    await thread.call(id, big)
    del big
    for _ in range(100):
        gc.collect()
        if gone() is None:
            break
        await asyncio.sleep(0.01)
    assert gone() is None
    thread.close()


def test_a_loop_that_is_closed_is_not_told() -> None:
    thread, gate = EngineThread(), threading.Event()

    async def leave() -> None:
        thread.call(gate.wait, 10.0)

    asyncio.run(leave())
    gate.set()
    thread.close()
