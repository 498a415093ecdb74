"""What a grid asks of a coordinator: its workers, and the texts of the prompts."""

from __future__ import annotations

import asyncio
import time

from specwire.client import AsyncClient
from specwire.generation import Generation
from specwire.info import WorkerState
from specwire.request import GenerateOptions
from tests.load.grid_rows import Grid, Texts
from tests.load.grid_services import NotStarted


async def workers_of(address: str, count: int) -> tuple[WorkerState, ...]:
    """Once all are ready. Raises NotStarted."""
    deadline = time.monotonic() + 30
    async with AsyncClient(address) as client:
        while True:
            workers = (await client.info()).workers
            if len(workers) >= count and all(worker.state == "ready" for worker in workers):
                return workers
            if time.monotonic() > deadline:
                raise NotStarted("; ".join(f"{w.role} {w.state} {w.reason}" for w in workers))
            await asyncio.sleep(0.05)


async def generate(address: str, grid: Grid, method: str) -> Texts:
    found: list[Generation] = []
    tokens, spent_ms = 0, 0.0
    async with AsyncClient(address) as client:
        for prompt in (grid.prompts[0], *grid.prompts):
            options: GenerateOptions = {**prompt, "method": method}
            if method != "plain":
                options["num_speculative_tokens"] = grid.k
            found.append(await client.generate(**options))
    for generation in found[1:]:
        tokens += len(generation.token_ids) - 1
        spent_ms += generation.acceptance.total_ms - generation.acceptance.ttft_ms
    return Texts(tuple(found[1:]), tokens / spent_ms * 1e3 if spent_ms else 0.0)
