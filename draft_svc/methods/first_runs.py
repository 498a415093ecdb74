"""What a block draft runs before there are sessions, so that none of them waits for a compiler or
for the capture of a graph."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Protocol

import torch

from draft_svc.methods.base import Draft, MethodInfo, Request
from draft_svc.methods.dflash_context import DFlashContext
from engine.api import Sampling, never
from engine.block_step import CallShape
from engine.compiling import compile_first
from engine.meeting import met

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
    method: Proposer,
    fill: Fill,
    shapes: Iterable[CallShape],
    writes: Iterable[int] = (),
    stopped: Callable[[], bool] = never,
) -> None:
    """Takes in each of those numbers of rows, then proposes in every shape, those of a batch
    together. What has no pages or no room is not run, nor what is left once it is `stopped`. Keeps
    no pages. Raises BackendUnavailable for a kernel that cannot be compiled."""
    began, each = time.perf_counter(), list(shapes)
    takes = list(writes)
    compile_first(
        method.info.device, partial(_run_all, method, fill, each, takes, stopped, False), stopped
    )
    count = _run_all(method, fill, each, takes, stopped, True)
    if method.info.device != "cpu":
        torch.cuda.empty_cache()  # what large batches took is for whoever needs it
    spent = time.perf_counter() - began
    log.info("warmed %d shapes of proposals of %s in %.1f s", count, method.info.method, spent)


def _run_all(
    method: Proposer,
    fill: Fill,
    shapes: Sequence[CallShape],
    writes: Sequence[int],
    stopped: Callable[[], bool],
    capture: bool,
) -> int:
    count = 0
    for rows in writes:
        if not stopped():
            met(f"that takes in {rows} rows", True, partial(_take_in, method, fill, rows))
    tokens, longest = method.info.max_draft_tokens, method.info.max_length_tokens
    length = max(2, min(_TOKENS, longest - method.info.block_size))
    for blocks, same in groupby(shapes, attrgetter("blocks")):
        contexts: list[DFlashContext] = []
        each = list(same)
        try:
            if not stopped():
                met(each[0], each[0].captured, partial(_fill_in, contexts, fill, blocks, length))
            for shape in each if contexts else ():
                if not stopped():
                    run = partial(_propose, method, contexts, shape, tokens, capture)
                    count += met(shape, shape.captured, run)
        finally:
            _close(method, contexts)
    return count


def _take_in(method: Proposer, fill: Fill, rows: int) -> bool:
    _close(method, fill(1, rows + 1))
    return True


def _fill_in(contexts: list[DFlashContext], fill: Fill, sessions: int, length: int) -> bool:
    contexts += fill(sessions, length)
    return True


def _propose(
    method: Proposer, contexts: list[DFlashContext], shape: CallShape, most: int, capture: bool
) -> bool:
    for context in contexts:
        context.sampling = _FILTERED if shape.filtered else _GREEDY
    requests = [Request(context, min(shape.slots, most)) for context in contexts]
    drafts = method.propose(requests, shape.captured and capture)
    return all(draft.ids for draft in drafts)


def _close(method: Proposer, contexts: list[DFlashContext]) -> None:
    for context in contexts:
        method.close(context)
