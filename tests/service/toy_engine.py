"""A deterministic engine without a model: each token and each row is a hash of the last few ids.

It writes the ids that it ran into pages, as a model its keys and values, and reads the prefix from
there: KV that is missing, or belongs to another session, changes the tokens.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.api import (
    Item,
    ItemResult,
    ModelInfo,
    Projection,
    Sampling,
    TokenLogprobs,
    WarmUp,
    nothing,
)
from engine.attention.report import AttentionReport, Candidate
from engine.kv.pool import PagePool, PageTable, PoolStats
from engine.row_bits import RowBits, as_bits

VOCAB, HIDDEN, LAYERS = 1000, 8, 4
EOS = 999


def next_token(prefix: Sequence[int], seed: int = 0) -> int:
    """The toy model: the same prefix and seed give the same token; never EOS by itself."""
    text = ",".join(map(str, [*prefix[-4:], len(prefix), seed]))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") % EOS


def seed_of(sampling: Sampling) -> int:
    """Each choice of a request goes its own way."""
    return sampling.seed + 7919 * sampling.choice


def scored(prefix: Sequence[int], token: int, top: int) -> TokenLogprobs:
    """Toy log probabilities: they tell the prefix and the token that they are of."""
    logprob = -(token + 1) / 16 - len(prefix)
    others = tuple(((token + i) % VOCAB, logprob - i) for i in range(top))
    return TokenLogprobs(token, logprob, 1 + len(prefix) % 5, others)


def continuation(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids, seed))
    return ids[len(prompt) :]


def row(prefix: Sequence[int], taps: Sequence[int]) -> torch.Tensor:
    """The row of the last token of `prefix`, width len(taps) * HIDDEN."""
    generator = torch.Generator().manual_seed(hash((tuple(prefix[-4:]), len(prefix))) % 2**62)
    values = torch.randn(LAYERS, HIDDEN, generator=generator)
    return values[list(taps)].reshape(-1).to(torch.bfloat16)


def projected(own: torch.Tensor, width: int) -> torch.Tensor:
    """What the toy projection makes of a row."""
    return -own[:width]


class ToyEngine:
    """Implements `engine.api.Engine`. `step_s` slows each step, `item_s` each item in it; a
    cleared `gate` holds them."""

    def __init__(
        self,
        pages: int = 64,
        page_tokens: int = 16,
        max_length: int = 512,
        step_s: float = 0.0,
        item_s: float = 0.0,
        row_s: float = 0.0,
        rows_independent: bool = True,
        block: int = 8,
        chunk: int = 32,
        any_thread: bool = False,
        projection: Projection | None = None,
    ) -> None:
        self.pool = PagePool(pages, page_tokens)
        self.info = ModelInfo(
            name="toy",
            fingerprint="toy-fp",
            numerics="toy-cpu",
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            layer_count=LAYERS,
            max_length=max_length,
            eos_token_ids=(EOS,),
            device="cpu",
            dtype="bfloat16",
            projection=projection,
        )
        self.attention = AttentionReport(
            "",
            "auto",
            "TOY",
            (Candidate("TOY"), Candidate("X", ("no",))),
            "fp32",
            64,
            page_tokens,
        )
        self.rows_independent = rows_independent
        self.item_s, self.row_s = item_s, row_s
        self.any_thread = any_thread
        self.step_s, self.block, self.chunk = step_s, block, chunk
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fail_steps = 0
        # Raised by whoever plays a capture.
        self.spent_once_ns = 0
        # What each step ran: (start, ids, draws) of its items.
        self.log: list[list[tuple[int, tuple[int, ...], int]]] = []
        # Tokens forced at an absolute position, to place stop ids.
        self.forced: dict[int, int] = {}
        # Id by page and offset; None was never written.
        self._kv: list[list[int | None]] = [[None] * page_tokens for _ in range(pages)]

    @property
    def once_ns(self) -> int:
        return self.spent_once_ns

    def allocate(self, length: int) -> PageTable:
        return self.pool.allocate(length)

    def block_limit(self, start: int, exact: bool) -> int:
        return self.block if exact else 64

    def admit_thread(self) -> bool:
        return self.any_thread

    def chunk_limit(self, start: int, exact: bool) -> int:
        return self.chunk - start % self.chunk if exact else 4096

    def stats(self) -> PoolStats:
        return self.pool.stats()

    def warm_up(self, wanted: WarmUp) -> int:
        return 0

    def check_integrity(self) -> None:
        self.pool.check_integrity()

    def step(
        self, items: Sequence[Item], launched: Callable[[], None] = nothing
    ) -> list[ItemResult]:
        self.entered.set()
        launched()
        self.gate.wait()
        rows = sum(len(item.ids) for item in items)
        if pause := self.step_s + self.item_s * len(items) + self.row_s * rows:
            time.sleep(pause)
        if self.fail_steps:
            self.fail_steps -= 1
            raise RuntimeError("toy failure")
        for item in items:
            item.table.truncate(item.start)
            item.table.reserve(item.start + len(item.ids))
        for source, to in self.pool.take_copies():
            self._kv[to] = list(self._kv[source])
        self.log.append([(item.start, tuple(item.ids), item.draws) for item in items])
        return [self._run(item) for item in items]

    def _write(self, item: Item) -> list[int]:
        """Writes the item's ids; everything the table holds then."""
        size = self.pool.page_tokens
        for position, token in enumerate(item.ids, item.start):
            page = item.table.pages[position // size]
            assert page not in self.pool.index, "a published page is written"
            self._kv[page][position % size] = token
        kv = []
        for position in range(item.start + len(item.ids)):
            token = self._kv[item.table.pages[position // size]][position % size]
            assert token is not None, f"no KV at position {position}"
            kv.append(token)
        return kv

    def _run(self, item: Item) -> ItemResult:
        assert all(0 <= i < VOCAB for i in item.ids)
        kv = self._write(item)
        drafts = list(item.ids[len(item.ids) - item.draws + 1 :]) if item.draws else []
        first = len(kv) - len(drafts)
        tokens: list[int] = []
        for i in range(item.draws):
            prefix = kv[: first + i]
            tokens.append(self.forced.get(len(prefix), next_token(prefix, seed_of(item.sampling))))
            if i < len(drafts) and drafts[i] != tokens[-1]:
                break
        accepted = max(0, len(tokens) - 1)
        valid = len(kv) - len(drafts) + accepted
        item.table.length = valid
        rows: Callable[[], RowBits] | None = None
        if item.taps:
            found = [row(kv[: p + 1], item.taps) for p in range(item.start, valid)]
            if item.projected:
                assert self.info.projection is not None
                found = [projected(own, self.info.projection.width) for own in found]
            made = as_bits(torch.stack(found))
            rows = lambda: made  # noqa: E731
        margins = tuple(0.5 for _ in tokens) if item.margins else ()
        logprobs: tuple[TokenLogprobs, ...] = ()
        if item.logprobs is not None:
            top = item.logprobs
            logprobs = tuple(scored(kv[: first + i], t, top) for i, t in enumerate(tokens))
        return ItemResult(
            tuple(tokens), accepted, rows, margins, len(item.ids), logprobs, _prompt_scores(item)
        )


def _prompt_scores(item: Item) -> tuple[TokenLogprobs, ...]:
    if item.prompt_logprobs is None:
        return ()
    end = min(item.start + len(item.ids) + 1, item.prompt_len)
    return tuple(
        scored(item.context[:p], item.context[p], item.prompt_logprobs)
        for p in range(item.start + 1, end)
    )


class ShapeEngine(ToyEngine):
    """Rows depend on their shape, much more than those of a real model: each position remembers
    which chunk it was computed in, and every later token depends on that. Blocks of up to `block`
    rows are padded to one width, so they are all alike."""

    def __init__(self, **options: Any) -> None:
        super().__init__(rows_independent=False, **options)

    def _write(self, item: Item) -> list[int]:
        size = self.pool.page_tokens
        shape = (item.start, len(item.ids)) if len(item.ids) > self.block else (0, 0)
        kv = super()._write(item)
        for position in range(item.start, len(kv)):
            page, offset = item.table.pages[position // size], position % size
            self._kv[page][offset] = hash((kv[position], shape)) % 2**31
        state, states = 0, []
        for position in range(len(kv)):
            value = self._kv[item.table.pages[position // size]][position % size]
            state = hash((state, value)) % 2**31
            states.append(state)
        return states
