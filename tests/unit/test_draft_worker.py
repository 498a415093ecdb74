"""Which jobs the draft's thread takes together."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

from draft_svc.jobs import Handle, Job, ProposeJob, UpdateJob
from draft_svc.worker import Worker


async def test_what_one_message_asks_for_is_one_tick() -> None:
    """Rows, tokens and the question: the thread must not begin, and catch up, with the rows."""
    ticks: list[list[Job]] = []
    begun = threading.Event()

    class Noted(Worker):
        def _tick(self, jobs: list[Job]) -> list[Any]:
            ticks.append(jobs)
            begun.set()
            return []

    method = SimpleNamespace(
        info=None, warm_up=lambda stopped: None, work=lambda: False,
        stats=lambda: SimpleNamespace(free=0, total=0, tables=0),
    )  # fmt: skip
    worker = Noted(lambda: cast(Any, {"toy": method}))
    await worker.start()
    try:
        handle = Handle("toy")
        rows = UpdateJob(handle, 3, (), ())
        worker.put(rows)
        assert not begun.wait(0.05), "the thread began in the middle of a message"
        tokens, question = UpdateJob(handle, 3, (1,), ()), ProposeJob(handle, 2, 1e9, print)
        worker.put(tokens)
        worker.put(question)
        await asyncio.to_thread(begun.wait, 5)
        worker.put(rows)
    finally:
        await worker.stop()
    assert ticks == [[rows, tokens, question], [rows]]
