"""What a draft method is: the values that go in and out, and the interface the engine thread
drives.

A method owns one `Context` per session. Every call is made from the engine thread, in order:
`open`, then any number of `update` and `propose`, then `close`. A method never fails a session:
when it cannot propose it says why.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from engine.api import Sampling, never
from engine.attention.report import AttentionReport
from engine.kv.pool import PoolStats

# Why a proposal has fewer tokens than were asked for: `Proposal.reason`.
REASON_NO_MATCH = "no_match"
REASON_K_LIMIT = "k_limit"
REASON_CAPACITY = "draft_capacity"
REASON_PAGES = "draft_pages"
REASON_ROWS_MISSING = "rows_missing"
REASON_CATCHING_UP = "catching_up"
REASON_VOCABULARY = "vocabulary"
REASON_DEADLINE = "deadline"
REASON_SUPERSEDED = "superseded"

RawRows = np.ndarray[Any, np.dtype[Any]]


class RowBlock(NamedTuple):
    """Hidden-state rows of positions [start, end): an array [count, width] in the wire dtype (bf16
    as uint16). `projected`: with the draft's `fc` and norm applied, as all of their session.
    """

    start: int
    rows: RawRows
    projected: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    def clip(self, low: int, high: int) -> RowBlock:
        """The part inside [low, high); empty when there is none."""
        if low <= self.start and self.start + len(self.rows) <= high:
            return self
        first = min(max(low - self.start, 0), len(self.rows))
        last = max(min(high - self.start, len(self.rows)), first)
        return RowBlock(self.start + first, self.rows[first:last], self.projected)


@dataclass(frozen=True, slots=True)
class RowNeeds:
    """The rows a method reads: outputs of 0-based target layers, before any final norm.
    `projected_width`: of rows with its `fc` and norm applied, which it takes as well; 0: it does
    not."""

    tap_ids: tuple[int, ...]
    width: int
    dtype: str = "bfloat16"
    projected_width: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """Measured time of one proposal of `tokens` for each of `sessions` with `context_tokens`
    committed.
    """

    tokens: int
    sessions: int
    context_tokens: int
    compute_ns: int


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """Everything the handshake says about a method. Zero or empty: it does not matter to the
    method.

    vocab_size     ids below it can be committed; where it is 0, `target_vocab_size` says
    rows_optional  the method reads rows, and can propose without them too
    """

    method: str
    name: str
    max_draft_tokens: int
    max_length_tokens: int = 0
    fingerprint: str = ""
    rows: RowNeeds | None = None
    target_hidden_size: int = 0
    target_layer_count: int = 0
    target_vocab_size: int = 0
    target_fingerprint: str = ""
    tokenizer_hash: str = ""
    slot_mode: str = ""
    block_size: int = 0
    mask_token_id: int | None = None
    d2t_hash: str = ""
    rope_style: str = ""
    rope_theta: float = 0.0
    rope_scaling: str = ""
    device: str = "cpu"
    attention: AttentionReport | None = None
    layer_attention: tuple[str, ...] = ()
    costs: tuple[Cost, ...] = ()
    vocab_size: int = 0
    rows_optional: bool = False

    @property
    def known_vocab_size(self) -> int:
        """Committed ids must be below it; 0: any id will do."""
        return self.vocab_size or self.target_vocab_size


class Draft(NamedTuple):
    """What a method proposes: at most `k` ids, the method's own probabilities for them (or none),
    and why not more. `source` names the method they come from where a drafter has several.
    """

    ids: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    reason: str = ""
    source: str = ""


ContextT = TypeVar("ContextT")


@dataclass(frozen=True, slots=True)
class Request(Generic[ContextT]):
    """One session that wants `k >= 1` tokens after what is committed; after `deadline` (of the
    monotonic clock) nobody waits for them.
    """

    context: ContextT
    k: int
    deadline: float = math.inf


class Method(ABC, Generic[ContextT]):
    """A loaded drafter."""

    name: ClassVar[str]

    @property
    @abstractmethod
    def info(self) -> MethodInfo: ...

    @abstractmethod
    def open(self, ids: Sequence[int], sampling: Sampling) -> ContextT:
        """A session that committed `ids` so far."""

    def restore(self, context: ContextT, target: str) -> tuple[int, int]:
        """Takes what a cache has of a context that was just opened: the rows of positions
        [start, end), returned, with end below the committed length. `target` is the fingerprint of
        the model whose rows they are; without one nothing is taken or kept.
        """
        return 0, 0

    @abstractmethod
    def update(
        self, context: ContextT, keep: int, tokens: Sequence[int], rows: Sequence[RowBlock]
    ) -> None:
        """Forgets what is beyond `keep` committed tokens, then appends. Rows are confirmed, in
        order and without gaps.
        """

    @abstractmethod
    def propose(self, requests: Sequence[Request[ContextT]]) -> list[Draft]:
        """One answer per request, in order; all sessions that are ready share one forward."""

    @abstractmethod
    def close(self, context: ContextT) -> None:
        """Gives everything back."""

    @property
    def once_ns(self) -> int:
        """Nanoseconds that proposals took so far for what they need not do again."""
        return 0

    def stats(self) -> PoolStats:
        """Pages held and free; a method without pages has none."""
        return PoolStats(free=0, total=0, tables=0)

    def work(self) -> bool:
        """One bounded piece of what need not be done before the next proposal; true while there is
        more. Called between ticks.
        """
        return False

    def warm_up(self, stopped: Callable[[], bool] = never) -> None:
        """Pays first-call costs before the service says it is ready, and measures what a proposal
        costs; leaves the rest out once it is `stopped`. Raises BackendUnavailable.
        """

    def check_integrity(self) -> None:
        """Raises AssertionError when pages leak; called when idle."""


AnyMethod = Method[Any]
