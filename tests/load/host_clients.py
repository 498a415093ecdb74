"""Part of `host_cost`: sessions of one client process, each one after another without an end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from specwire.client import AsyncClient, Delta

_BEGIN_S = 60.0
LONGEST_TOKENS = 8000


@asynccontextmanager
async def load(
    client: AsyncClient, asked: dict[str, Any]
) -> AsyncIterator[Callable[[], dict[str, int]]]:
    """Once all sessions have begun, until the block ends; tells how many deltas and tokens came.
    Raises what a session failed with."""
    counts: Counter[str] = Counter(tokens=0, deltas=0)
    numbers = asked["numbers"]
    begun = [asyncio.Event() for _ in numbers]

    async def session(number: int, first: asyncio.Event) -> None:
        while True:
            stream = client.stream(
                token_ids=[(7 * number + i) % 900 for i in range(asked["prompt_tokens"])],
                max_tokens=LONGEST_TOKENS - asked["prompt_tokens"],
                ignore_eos=True,
                temperature=asked["temperature"],
                seed=number,
                method=asked["method"],
                num_speculative_tokens=asked["k"],
                return_token_ids=True,
            )
            async with stream:
                async for event in stream:
                    first.set()
                    if isinstance(event, Delta):
                        counts["deltas"] += 1
                        counts["tokens"] += len(event.token_ids)

    work = [asyncio.create_task(session(*pair)) for pair in zip(numbers, begun, strict=True)]
    try:
        async with asyncio.timeout(_BEGIN_S):
            for event in begun:
                await event.wait()
        yield lambda: dict(counts)
        for task in work:
            if task.done():
                task.result()  # it failed
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
