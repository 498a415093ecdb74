"""A first-order Markov target over ten tokens, and drafts that guess at it.

The law of every pair of tokens is a known matrix, so the text that comes out of the services can be
held against it. Noise is `engine.noise`, the reference of what every kernel reproduces.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models

from engine.api import Item, ItemResult, nothing
from engine.noise import philox
from specwire.client import AsyncClient
from specwire.v1 import draft_pb2
from tests.service.coordinator_harness import Reply, ScriptedDraft, proposal
from tests.service.toy_engine import ToyEngine

VOCAB = 10
POSITIONS = 2304
BLOCK = 8


def transition_matrix(seed: int) -> np.ndarray[Any, Any]:
    """Rows of probabilities, none below 0.01, so that every cell of the test is well filled."""
    rows = np.random.default_rng(seed).dirichlet(np.full(VOCAB, 0.5), VOCAB)
    return 0.9 * rows + 0.1 / VOCAB


TARGET, DRAFT = transition_matrix(1), transition_matrix(2)


@functools.cache
def noise(seed: int) -> np.ndarray[Any, Any]:
    """Gumbel noise [POSITIONS, VOCAB] of choice 0: `engine.noise.gumbel` for all indices."""
    groups = -(-VOCAB // 4)
    counter = torch.zeros(POSITIONS, groups, 4, dtype=torch.int64)
    counter[..., 0] = torch.arange(groups)
    counter[..., 1] = torch.arange(POSITIONS)[:, None]
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32)).reshape(POSITIONS, -1)[:, :VOCAB]
    uniform = ((words >> 9).float() + 0.5) * 2.0**-23
    return (-torch.log(-torch.log(uniform))).double().numpy()


def draw(law: np.ndarray[Any, Any], seed: int, index: int) -> int:
    return int((np.log(law) + noise(seed)[index]).argmax())


class MarkovEngine(ToyEngine):
    """Draws each token from the row of the one before it, and keeps a draft that equals the draw.

    `sizes` are the numbers of sessions in the steps.
    """

    def __init__(self) -> None:
        super().__init__(pages=64 * (POSITIONS // 64 + 1), page_tokens=64, max_length=POSITIONS)
        self.info = replace(self.info, vocab_size=VOCAB, eos_token_ids=())
        self.sizes: list[int] = []

    def step(
        self, items: Sequence[Item], launched: Callable[[], None] = nothing
    ) -> list[ItemResult]:
        self.sizes.append(len(items))
        return [self._run(item) for item in items]

    def _run(self, item: Item) -> ItemResult:
        assert item.table.length == item.start, "the item does not continue the KV"
        first = len(item.ids) - item.draws
        tokens: list[int] = []
        for i in range(item.draws):
            last, draft = item.ids[first + i], item.ids[first + i + 1 : first + i + 2]
            token, kept = self.choose(item, last, item.start + first + i + 1, draft)
            tokens.append(token)
            if not kept:
                break
        accepted = max(0, len(tokens) - 1)
        item.table.length = item.start + len(item.ids) - max(0, item.draws - 1) + accepted
        return ItemResult(tuple(tokens), accepted, None, (), len(item.ids))

    def choose(self, item: Item, last: int, index: int, draft: Sequence[int]) -> tuple[int, bool]:
        """The token at `index`, and whether the draft token there (none: empty) is kept."""
        token = draw(TARGET[last], item.sampling.seed, index)
        return token, bool(draft) and draft[0] == token


class SharedNoiseRejection(MarkovEngine):
    """What must never be built: rejection sampling with probability p/q, whose replacement is drawn
    with the noise that the draft was drawn with. Right with fresh noise, biased with shared noise.
    """

    fresh = False

    def choose(self, item: Item, last: int, index: int, draft: Sequence[int]) -> tuple[int, bool]:
        seed = item.sampling.seed
        if not draft:
            return draw(TARGET[last], seed, index), False
        p, q = TARGET[last], DRAFT[last]
        if _uniforms(seed)[index] < p[draft[0]] / q[draft[0]]:
            return draft[0], True
        rest = np.maximum(p - q, 0) + 1e-300
        return draw(rest, seed ^ 0xABCDEF if self.fresh else seed, index), False


class FreshNoiseRejection(SharedNoiseRejection):
    fresh = True


@functools.cache
def _uniforms(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).random(POSITIONS)


# -- drafts --------------------------------------------------------------------------------------


class MarkovDraft(ScriptedDraft):
    """Draft service whose sessions guess in different ways, by session id."""

    def __init__(self, ways: Sequence[str]) -> None:
        super().__init__(self._answer)
        self.ways = ways
        self.rng = np.random.default_rng(3)

    def _answer(self, draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
        seed = self.opened_seed[item.key.session_id]
        way = getattr(self, self.ways[item.key.session_id % len(self.ways)])
        guess = way(ids, item.k, seed)
        return [proposal(item, len(ids), guess, reason="" if guess else "nothing")]

    def _handle(self, item: draft_pb2.DraftItem) -> list[Reply]:
        if item.HasField("open"):
            self.opened_seed[item.open.key.session_id] = item.open.sampling.seed
        return super()._handle(item)

    @functools.cached_property
    def opened_seed(self) -> dict[int, int]:
        return {}

    def coupled(self, ids: list[int], k: int, seed: int) -> list[int]:
        """Another law, drawn with the target's noise."""
        guess = [ids[-1]]
        for i in range(k):
            guess.append(draw(DRAFT[guess[-1]], seed, len(ids) + i))
        return guess[1:]

    def independent(self, ids: list[int], k: int, seed: int) -> list[int]:
        """Another law, drawn with noise of its own."""
        guess = [ids[-1]]
        for _ in range(k):
            guess.append(int(self.rng.choice(VOCAB, p=DRAFT[guess[-1]])))
        return guess[1:]

    def mostly_right(self, ids: list[int], k: int, seed: int) -> list[int]:
        """The target's own draws, each with probability 0.8 and anything else otherwise."""
        guess = [ids[-1]]
        for i in range(k):
            right = draw(TARGET[guess[-1]], seed, len(ids) + i)
            wrong = int(self.rng.integers(VOCAB))
            guess.append(right if self.rng.random() < 0.8 else wrong)
        return guess[1:]

    def biased(self, ids: list[int], k: int, seed: int) -> list[int]:
        """Only ever right about even tokens, and as long as the last token says."""
        right = self.mostly_right(ids, k, seed)[: ids[-1]]
        return [token if token % 2 == 0 else 1 for token in right]


# -- generations ---------------------------------------------------------------------------------


def document() -> bytes:
    tokenizer = Tokenizer(models.WordLevel({f"{i}": i for i in range(VOCAB)}, unk_token="0"))
    tokenizer.decoder = decoders.Fuse()
    fields = {"tokenizer": json.loads(tokenizer.to_str()), "chat_template": "", "special": {}}
    return json.dumps(fields).encode()


async def texts(client: AsyncClient, count: int, tokens: int) -> list[Any]:
    """Generations of sessions that run side by side; the seeds are always the same."""

    async def one(number: int) -> Any:
        return await client.generate(
            token_ids=[number % VOCAB],
            max_tokens=tokens,
            temperature=1.0,
            seed=1000 + number,
            num_speculative_tokens=BLOCK - 1,
            return_token_ids=True,
        )

    return await asyncio.gather(*(one(number) for number in range(count)))


# -- the test statistic ----------------------------------------------------------------------------


def pair_counts(sequences: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
    counts = np.zeros((VOCAB, VOCAB), dtype=np.int64)
    for ids in sequences:
        np.add.at(counts, (ids[:-1], ids[1:]), 1)
    return counts


def chi_square(counts: np.ndarray[Any, Any], law: np.ndarray[Any, Any]) -> float:
    """Pearson's statistic of transition counts, given how often each first token came; it has
    VOCAB * (VOCAB - 1) degrees of freedom.
    """
    expected = counts.sum(1, keepdims=True) * law
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_limit(freedom: int, z: float) -> float:
    """Quantile of the chi-square law at the normal quantile `z` (Wilson and Hilferty, 1931)."""
    return float(freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3)
