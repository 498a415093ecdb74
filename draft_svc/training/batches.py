"""Batches of documents with random anchors, the same for every run with the same seed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draft_svc.training.shards import Corpus
from engine.errors import CheckpointError

Place = tuple[int, int]
_POOL = 16384  # documents sorted by size together, so that a batch needs little padding
_ROUND = 32


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Budgets of one step: padded target tokens and block slots. `density`: anchors per answer
    token of a document."""

    tokens: int = 32768
    block_tokens: int = 32768
    density: float = 0.25
    max_anchors: int = 128
    max_length: int = 1024
    groups: int = 4
    block: int = 8


@dataclass(frozen=True, slots=True)
class Batch:
    """ids int64 [B, L] right-padded with 0, lengths [B], anchors int64 [B, A] rising. Row `blocks`
    [N] indexes the flattened [B * A] anchors that count; `reach`: context keys per anchor group.
    """

    ids: Tensor
    lengths: Tensor
    anchors: Tensor
    blocks: Tensor
    reach: tuple[int, ...]
    answer_tokens: int

    def to(self, device: torch.device) -> Batch:
        if device.type != "cuda":
            return self
        ids, lengths, anchors, blocks = (
            t.pin_memory().to(device, non_blocking=True)
            for t in (self.ids, self.lengths, self.anchors, self.blocks)
        )
        return Batch(ids, lengths, anchors, blocks, self.reach, self.answer_tokens)


def anchor_counts(
    prompts: NDArray[np.int64], lengths: NDArray[np.int64], o: BatchOptions
) -> NDArray[np.int64]:
    """How many anchors each document gets: by its own answer, never by the batch it is in."""
    answers = np.minimum(lengths, o.max_length) - prompts
    wanted = np.ceil(answers * o.density).astype(np.int64)
    # The last token of an answer has nothing after it to propose.
    counts: NDArray[np.int64] = np.clip(np.minimum(wanted, answers - 1), 0, o.max_anchors)
    return counts


def draw_anchors(
    rng: np.random.Generator, prompt: int, length: int, count: int
) -> NDArray[np.int64]:
    """`count` different positions in [prompt, length - 2], rising: answer tokens with at least one
    token after them."""
    return np.sort(rng.choice(length - 1 - prompt, count, replace=False) + prompt)


class Batches:
    """An endless stream of batches over a corpus, each with the place after it."""

    def __init__(self, corpus: Corpus, options: BatchOptions, seed: int) -> None:
        self.corpus, self.options, self.seed = corpus, options, seed

    def plan(self, epoch: int) -> list[NDArray[np.int64]]:
        """The batches of one epoch as document indices."""
        o, corpus = self.options, self.corpus
        rng = np.random.default_rng((self.seed, epoch))
        lengths = np.minimum(corpus.lengths, o.max_length)
        counts = anchor_counts(corpus.prompts.astype(np.int64), lengths, o)
        order = rng.permutation(np.flatnonzero(counts > 0))
        found: list[NDArray[np.int64]] = []
        for first in range(0, len(order), _POOL):
            pool = order[first : first + _POOL]
            # Within a pool: by anchors in coarse steps, then by length.
            pool = pool[np.lexsort((lengths[pool], counts[pool] // 8))]
            found += self._cut(pool, lengths, counts)
        return [found[i] for i in rng.permutation(len(found))]

    def _cut(
        self, pool: NDArray[np.int64], lengths: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> list[NDArray[np.int64]]:
        o, found, first, longest, most = self.options, [], 0, 0, 0
        for i, document in enumerate(pool):
            longest = max(longest, _padded(int(lengths[document]), _ROUND))
            most = max(most, _padded(int(counts[document]), o.groups))
            size = i - first + 1
            if size > 1 and (size * longest > o.tokens or size * most * o.block > o.block_tokens):
                found.append(pool[first:i])
                first = i
                longest = _padded(int(lengths[document]), _ROUND)
                most = _padded(int(counts[document]), o.groups)
        found.append(pool[first:])
        return found

    def build(self, documents: NDArray[np.int64], rng: np.random.Generator) -> Batch:
        o, corpus = self.options, self.corpus
        lengths = np.minimum(corpus.lengths[documents], o.max_length)
        prompts = corpus.prompts[documents].astype(np.int64)
        counts = anchor_counts(prompts, lengths, o)
        longest = _padded(int(lengths.max()), _ROUND)
        most = _padded(int(counts.max()), o.groups)
        ids = np.zeros((len(documents), longest), dtype=np.int64)
        anchors = np.zeros((len(documents), most), dtype=np.int64)
        used = np.zeros((len(documents), most), dtype=bool)
        for row, document in enumerate(documents):
            n, count = int(lengths[row]), int(counts[row])
            ids[row, :n] = corpus.document(int(document))[:n]
            drawn = draw_anchors(rng, int(prompts[row]), n, count)
            # Spread over the row, so that every group of anchors has its share of all documents;
            # what is left over repeats a neighbour and does not count.
            place = np.linspace(0, most - 1, count).round().astype(np.int64)
            used[row, place] = True
            anchors[row] = drawn[np.minimum(np.cumsum(used[row]) - 1, count - 1)]
        edges = anchors.reshape(len(documents), o.groups, -1).max((0, 2))
        reach = tuple(min(_padded(int(edge), _ROUND), longest) for edge in edges)
        return Batch(
            torch.from_numpy(ids),
            torch.from_numpy(lengths.astype(np.int64)),
            torch.from_numpy(anchors),
            torch.from_numpy(np.flatnonzero(used.reshape(-1))),
            reach,
            int((lengths - prompts).sum()),
        )

    def stream(self, place: Place = (0, 0)) -> Iterator[tuple[Batch, Place]]:
        """Batches from `place` (epoch, number) on."""
        epoch, first = place
        while True:
            plan = self.plan(epoch)
            if not plan:
                raise CheckpointError("no document of the data has an answer of two tokens")
            for number in range(first, len(plan)):
                rng = np.random.default_rng((self.seed, epoch, number))
                last = number + 1 == len(plan)
                after = (epoch + 1, 0) if last else (epoch, number + 1)
                yield self.build(plan[number], rng), after
            epoch, first = epoch + 1, 0


def _padded(value: int, to: int) -> int:
    return -(-value // to) * to


def ahead(source: Iterator[tuple[Batch, Place]], depth: int = 4) -> Iterator[tuple[Batch, Place]]:
    """Builds the next batches in a thread while the device works."""
    with ThreadPoolExecutor(1) as pool:
        waiting = deque(pool.submit(next, source) for _ in range(depth))
        try:
            while True:
                ready = waiting.popleft().result()
                waiting.append(pool.submit(next, source))
                yield ready
        finally:
            for future in waiting:
                future.cancel()
