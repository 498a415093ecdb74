"""Steps with prompts for checks: mixes of all kinds of items, and whether two runs are equal."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

from engine.api import Item, ItemResult, Sampling
from engine.graphs import StepGraphs
from engine.kv.latent import LatentCache
from engine.runner import NativeEngine

KINDS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.9, seed=2**63 + 5, top_k=20, top_p=0.9),
    Sampling(temperature=1.2, seed=3, choice=2, min_p=0.05),
    Sampling(temperature=0.7, seed=11),
)
# Tokens in front of an item at most.
MOST_BEFORE = 40


class Unwritten(TorchFunctionMode):
    """Memory that is asked for holds what no sum survives."""

    _asked: ClassVar[set[Callable[..., Any]]] = {
        torch.empty, torch.empty_like, torch.Tensor.new_empty,
    }  # fmt: skip

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in self._asked and made.is_floating_point():
            made.fill_(torch.nan)
        return made


@contextmanager
def launched(engine: NativeEngine) -> Iterator[None]:
    """No step with prompts is padded meanwhile."""
    stepper = engine._stepper
    assert stepper is not None
    kept, stepper._graphs = stepper._graphs, StepGraphs("none", False)
    try:
        yield
    finally:
        stepper._graphs = kept


def pages_of(engine: NativeEngine) -> list[torch.Tensor]:
    """All of the target's cache but the page that belongs to no session, by reference."""
    cache: Any = engine._cache
    every = [cache.data] if isinstance(cache, LatentCache) else [*cache.k, *cache.v]
    size = cache.page_count
    axes = [tensor.shape.index(size) for tensor in every]
    return [t.narrow(axis, 0, size - 1) for t, axis in zip(every, axes, strict=True)]


def mix(rng: random.Random, engine: NativeEngine, chunk: int, taps: tuple[int, ...]) -> list[Item]:
    """A prompt's chunk of so many rows, beside others, blocks and single tokens in any order; each
    behind a context of its own."""
    items, asked = [], [(chunk, rng.choice([0, 1]))]
    if rng.random() < 0.5:
        rows = rng.randint(1, 4)
        asked.append((rows, rng.randint(0, 1)))
    asked += [(rows, rows) for rows in (rng.randint(1, 3) for _ in range(rng.randint(0, 3)))]
    rng.shuffle(asked)
    for rows, draws in asked:
        start = rng.choice([0, rng.randint(1, MOST_BEFORE)])
        table = engine.allocate(start + rows)
        if start:
            ids = [rng.randrange(3, 90) for _ in range(start)]
            engine.step([Item(table, ids, 0, 0)])
        ids, kind = [rng.randrange(3, 90) for _ in range(rows)], rng.choice(KINDS)
        items.append(Item(table, ids, start, draws, kind, taps=rng.choice([(), taps])))
    return items


def same(one: Sequence[ItemResult], other: Sequence[ItemResult]) -> bool:
    for a, b in zip(one, other, strict=True):
        rows = (a.rows is None) == (b.rows is None)
        if rows and a.rows is not None and b.rows is not None:
            rows = torch.equal(a.rows, b.rows)
        if not rows or (a.tokens, a.accepted, a.width) != (b.tokens, b.accepted, b.width):
            return False
    return True
