"""What an engine is: the values that go in and out of one step. Read this file first.

A service builds a `Batch` of `Item`s, one per session, and gets one `ItemResult` per item back.
The engine owns the pages; the caller owns everything else. Nothing in this room knows gRPC.

Lengths. With `y` the committed tokens and `n = len(y)`, KV exists for positions `[0, n-1)`;
`y[n-1]` is the anchor, chosen but not yet run. A verify item runs `[anchor, d_1 .. d_k]` at
positions `n-1 .. n-1+k`.

Acceptance. The engine draws each position's token itself:
`argmax(filtered_logits / T + gumbel(seed, choice, index, token))`, where `index` is the position of
the token being drawn; plain argmax at T = 0, ties to the lowest id. A draft token is accepted while
it equals that draw, so a draft can change speed only, never the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from engine.attention.report import AttentionReport
from engine.kv.pool import PageTable, PoolStats
from engine.row_bits import RowBits, as_tensor

if TYPE_CHECKING:
    from engine.colocated import Group, Handles, TapRows, Target


@dataclass(frozen=True, slots=True)
class Sampling:
    """Options of one choice, already validated. `temperature == 0` is greedy; the defaults of the
    others are off.

    The order of application is vLLM's: allowed ids (`min_tokens`, `bad_sequences`), `logit_bias`,
    penalties, temperature, `min_p`, `top_k`, `top_p`. Every position sees the tokens before it, the
    draft prefix included.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    choice: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # (token id, value added), ids rising.
    logit_bias: tuple[tuple[int, float], ...] = ()
    # No output may end with one of these.
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    # `stop_ids` cannot be drawn before the output has this many tokens.
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    # Whether any of the above may change logits: asked in every step, so it is found once.
    alters: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        alters = bool(
            self.logit_bias or self.bad_sequences or self.min_tokens > 0 or self.penalises
        )
        object.__setattr__(self, "alters", alters)

    @property
    def penalises(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class Projection:
    """A draft's `fc` and norm, which the engine applies to rows: `fingerprint` of the draft, the
    layers that it reads, and the `width` of what comes of them."""

    fingerprint: str
    taps: tuple[int, ...]
    width: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a loaded model is. `fingerprint` covers config and weights; `numerics` covers device,
    build, dtypes and kernels. `loose`: steps in which no item is `exact` may run other kernels, so
    that their KV has other bits. `prefill_chunk`: most rows of a prompt in one step.
    `projection`: what rows may be besides the outputs of layers."""

    name: str
    fingerprint: str
    numerics: str
    vocab_size: int
    hidden_size: int
    layer_count: int
    max_length: int
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str
    loose: bool = False
    prefill_chunk: int = 256
    projection: Projection | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log softmax of a row's logits before any sampling option: of the token chosen, its rank (1:
    the highest), and the `top` highest as (id, value), ties to the lowest id."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


# One for all: most items of tests and measurements name none.
_DEFAULT_SAMPLING = Sampling()


# What a step makes for each session is a tuple: a frozen dataclass takes three times as long.
class Item(NamedTuple):
    """One session's share of a step. All fields are set by the caller.

    ids      tokens to run, at positions [start, start + len(ids))
    draws    how many trailing rows draw a token: 0 for a prompt chunk with more to come, 1 for the
             last chunk and for plain decoding, 1 + k for a verify block whose last k ids are draft
             tokens
    taps     layers whose outputs are returned as rows (0-based, before any final norm), strictly
             increasing
    projected  the rows are those of `ModelInfo.projection`, whose layers `taps` are
    exact    keep the result independent of batch mates and of k (levels L2/L3); a step in which
             no item asks for it may run other kernels
    context  the session's committed tokens, the ids of this item that are no drafts included;
             `context[prompt_len:]` is the output so far. Read only where `sampling` needs it
    logprobs alternatives per drawn token; None: none are computed
    prompt_logprobs  the same for the rows of a prompt chunk: row i scores the token after it
    drafted  a co-located drafter, where there is one, keeps its context for these rows
    """

    table: PageTable
    ids: Sequence[int]
    start: int
    draws: int
    sampling: Sampling = _DEFAULT_SAMPLING
    taps: tuple[int, ...] = ()
    exact: bool = True
    margins: bool = False
    context: Sequence[int] = ()
    prompt_len: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    drafted: bool = True
    projected: bool = False


class ItemResult(NamedTuple):
    """What one item gave. The engine has truncated the table to the valid length.

    tokens   the accepted draft tokens and one of the target's own: accepted + 1 ids (empty when
             draws == 0)
    rows     bf16 CPU tensor [valid rows, len(taps) * hidden_size], projected ones [valid rows,
             width]: every row of a prompt chunk, accepted + 1 rows of a verify block; None without
             taps. They may still be on their way from a device: whoever reads them waits, on any
             thread. `late_rows` gives the same as the bits that are sent
    margins  per token, highest filtered logit minus the second highest
    width    rows the step ran for this item, padding included
    logprobs         one per token of `tokens`, when asked for
    prompt_logprobs  of a prompt chunk: one per row whose next token is in `context`
    """

    tokens: tuple[int, ...]
    accepted: int
    late_rows: Callable[[], RowBits] | None
    margins: tuple[float, ...]
    width: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def rows(self) -> torch.Tensor | None:
        return None if self.late_rows is None else as_tensor(self.late_rows())


def nothing() -> None:
    """For whoever need not be told."""


def never() -> bool:
    """For whoever is not stopped."""
    return False


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What is worth meeting before there are sessions.

    sessions  graphs are captured of steps of up to so many; for more, kernels are compiled
    widest    most rows of a session's block
    exports   layers whose rows sessions will ask for, as `Item.taps`: graphs of such steps, and of
              those without only for one and two sessions
    apart     a co-located drafter keeps no context for some sessions
    stopped   asked between two steps: whether to leave the rest out, since nobody will be served
    """

    sessions: int
    widest: int
    exports: tuple[int, ...] = ()
    apart: bool = False
    stopped: Callable[[], bool] = field(default=never, compare=False)


class Engine(Protocol):
    """A loaded target model with its pages. Not thread-safe: one thread calls it."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def attention(self) -> AttentionReport: ...

    @property
    def rows_independent(self) -> bool:
        """True when a row of an `exact` step does not depend on the rows beside it (checked at
        start): `exact` then needs no padding, no grid and no step of its own."""
        ...

    def allocate(self, length: int) -> PageTable:
        """Pages for `length` tokens. Raises `OutOfPages` naming the pages needed and free."""
        ...

    def block_limit(self, start: int, exact: bool) -> int:
        """Most rows that a block starting at position `start` may have (exact mode: fixed width,
        never across a KV bucket edge)."""
        ...

    def chunk_limit(self, start: int, exact: bool) -> int:
        """Most prompt tokens that a chunk starting at `start` may have (exact mode: up to the next
        edge of an absolute grid)."""
        ...

    def step(
        self, items: Sequence[Item], launched: Callable[[], None] = nothing
    ) -> list[ItemResult]:
        """Runs all items, one result each, in order. Raises only for bugs: the caller validates
        ids and lengths. `launched` is called when the host has done its part for now, and other
        threads can have the interpreter: at least once where the device is waited for."""
        ...

    def admit_thread(self) -> bool:
        """Lets the calling thread run steps too, one thread at a time. False: it cannot; where
        steps compute on the CPU, kernels have threads that belong to the one that loaded them."""
        ...

    @property
    def once_ns(self) -> int:
        """Nanoseconds that steps took so far for what they need not do again, such as the capture
        of a graph when a shape is first met."""
        ...

    def warm_up(self, wanted: WarmUp) -> int:
        """Runs what compiles kernels and captures graphs, before there are sessions, and returns
        how many shapes of steps: 0 where nothing is made when it is first met. What there is no
        room for is left out; no pages are kept. Raises SettingRefused for layers that are not
        there, BackendUnavailable for a kernel that cannot be compiled."""
        ...

    def stats(self) -> PoolStats: ...

    def check_integrity(self) -> None:
        """Raises AssertionError when pages leak or are shared by mistake; called when idle."""
        ...


class Ask(NamedTuple):
    """A session whose verdict is decided and that wants `k >= 1` tokens behind `anchor`, its last
    committed token. `table` holds the context: the anchor stands at position `table.length`."""

    table: PageTable
    anchor: int
    k: int
    sampling: Sampling


class Proposed(NamedTuple):
    """At most `k` ids, the draft's own probabilities for them (or none), and why not more."""

    ids: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    reason: str = ""


class Drafter(Protocol):
    """A drafter in the target's process. Its context lives in KV groups under the target's page
    tables and is written in the target's own steps.

    The order of calls: `register` on the event loop; then on the engine's thread `describe`,
    `attach`, `warm_up`, and from then on `write` (inside a step) and `propose` (between two).
    """

    @property
    def method(self) -> str:
        """What sessions ask for by name."""
        ...

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens of one proposal; known when attached."""
        ...

    @property
    def once_ns(self) -> int:
        """Of its proposals, as `Engine.once_ns`."""
        ...

    @property
    def services(self) -> tuple[str, ...]:
        """Full names of the gRPC services that `register` adds."""
        ...

    def register(self, server: Any, *, incarnation: int, registry: Any) -> None:
        """Adds its services to the gRPC server of the target, as the same process, and its metrics
        to a Prometheus registry. They answer that they are loading until `attach`."""
        ...

    def describe(self, target: Target) -> tuple[Group, ...]:
        """The groups that its context needs, before anything is allocated. Raises
        BackendUnavailable where one cannot be had, CheckpointError, SettingRefused."""
        ...

    def attach(self, handles: Handles) -> tuple[int, ...]:
        """Loads its weights, over the memory of its groups. Returns the tap layers it reads."""
        ...

    def warm_up(self, stopped: Callable[[], bool] = never) -> None:
        """Pays first-call costs and measures what a proposal costs, or leaves the rest of it out
        once it is `stopped`."""
        ...

    def write(self, rows: TapRows) -> None:
        """Makes context of rows of the step that runs. Does not wait for the device."""
        ...

    def propose(self, asks: Sequence[Ask]) -> list[Proposed]:
        """One answer each, in order; all that are ready share one forward. The tables keep their
        lengths and their pages."""
        ...
