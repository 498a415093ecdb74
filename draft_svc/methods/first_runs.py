"""What a block draft runs before there are sessions, so that none of them waits for a compiler or
for the capture of a graph."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Protocol

import torch

from draft_svc.methods.base import Draft, MethodInfo, Request
from draft_svc.methods.dflash_context import DFlashContext
from engine.api import Sampling
from engine.block_step import CallShape

log = logging.getLogger(__name__)

# Committed tokens of a session: few, so that many have pages.
_TOKENS = 16
_GREEDY = Sampling(temperature=0.0)
_FILTERED = Sampling(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01)

# Sessions with so many committed tokens each, and all rows that belong to them.
Fill = Callable[[int, int], list[DFlashContext]]


class Proposer(Protocol):
    """A `Method` whose proposals may leave captures to later."""

    @property
    def info(self) -> MethodInfo: ...

    def propose(
        self, requests: Sequence[Request[DFlashContext]], capture: bool = True
    ) -> list[Draft]: ...

    def close(self, context: DFlashContext) -> None: ...


def first_runs(
    method: Proposer, fill: Fill, shapes: Iterable[CallShape], writes: Iterable[int] = ()
) -> None:
    """Takes in each of those numbers of rows, then proposes in every shape, those of a batch
    together. What has no pages or no room is not run. Keeps no pages."""
    began, count = time.perf_counter(), 0
    for rows in writes:
        _close(method, fill(1, rows + 1))
    tokens, longest = method.info.max_draft_tokens, method.info.max_length_tokens
    length = max(2, min(_TOKENS, longest - method.info.block_size))
    for blocks, same in groupby(shapes, attrgetter("blocks")):
        contexts = fill(blocks, length)
        for shape in same:
            for context in contexts:
                context.sampling = _FILTERED if shape.filtered else _GREEDY
            requests = [Request(c, min(shape.slots, tokens)) for c in contexts]
            count += all(draft.ids for draft in method.propose(requests, shape.captured))
        _close(method, contexts)
    if method.info.device != "cpu":
        torch.cuda.empty_cache()  # what large batches took is for whoever needs it
    spent = time.perf_counter() - began
    log.info("warmed %d shapes of proposals of %s in %.1f s", count, method.info.method, spent)


def _close(method: Proposer, contexts: list[DFlashContext]) -> None:
    for context in contexts:
        method.close(context)
