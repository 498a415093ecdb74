"""A session: who it is, what it has committed, which step it waits for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.api import Sampling, TokenLogprobs
from engine.kv.pool import PageTable
from specwire.v1 import common_pb2, target_pb2
from target_svc.asks import Answer
from target_svc.rows import RowHistory, RowSink


class Key(NamedTuple):
    coordinator: int
    session_id: int
    generation: int

    @property
    def name(self) -> tuple[int, int]:
        """What stays the same when a session is opened again."""
        return self.coordinator, self.session_id


class Link(Protocol):
    """The stream that a session's replies go to: always the one its latest item came from."""

    @property
    def closed(self) -> bool: ...

    def send(self, reply: target_pb2.TargetReply) -> None: ...

    def hurry(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OpenSpec:
    """A validated `OpenTarget`. `limit_len` is the committed length at which the session ends;
    `projected`: its rows are those of the engine's projection."""

    ids: tuple[int, ...]
    prompt_len: int
    limit_len: int
    sampling: Sampling
    stop_ids: frozenset[int]
    exact: bool
    margins: bool
    # Alternatives per token; None: no log probabilities.
    logprobs: int | None
    prompt_logprobs: int | None
    taps: tuple[int, ...]
    rows_from: int
    lease_s: float
    free_run: int
    projected: bool = False
    # Most cached tokens that are run again for the rows that the draft lacks.
    row_window: int = 0
    fork_of: Key | None = None
    # Lower comes first.
    priority: int = 0
    takes_prefix: bool = True
    publishes: bool = True
    # Most tokens of a proposal by the co-located drafter, 0 without one; and how many step 0 asks
    # for.
    draft_tokens: int = 0
    then_propose: int = 0


@dataclass(slots=True)
class Step:
    """One step of a session, waiting or running.

    `deadline` is by the event loop's clock; `received` and `started` by `perf_counter`, which is
    finer: uvloop's clock counts milliseconds.
    """

    step_id: int
    base_len: int
    draft: list[int]
    free_run: int
    deadline: float | None
    received: float
    # False for the steps of a free run: nobody asked for them, so they renew no lease.
    asked: bool = True
    started: float | None = None
    compute_s: float = 0.0
    # Spent on what the engine need not do again; no part of the above.
    once_ns: int = 0
    width: int = 0
    # Tokens that the drafter proposes behind this step's verdict, or the last one's of
    # its free run; `drafts_ahead`: behind each, and the next step verifies them.
    then_propose: int = 0
    drafts_ahead: bool = False
    # Longest wait for a draft service's proposals.
    draft_wait_us: int = 0


class Held(Protocol):
    """A verdict that waits for the proposal that continues it."""

    def asked(self) -> None: ...

    def settle(self, answer: Answer | None) -> None: ...

    def drop(self) -> None: ...


@dataclass(slots=True, eq=False)
class Session:
    """`ids` are the committed tokens; KV exists for the first `kv` of them, at most all but one.

    A session without a table waits for pages: it is new, or gave them to a session before it.
    """

    key: Key
    spec: OpenSpec
    link: Link
    ids: list[int]
    history: RowHistory
    lease_s: float
    lease_until: float
    sink: RowSink | None = None
    table: PageTable | None = None
    # Prompt positions that need not be run for anything but their KV: their rows are out, or will
    # never be. None: not begun.
    computed: int | None = None
    # First position whose row is pushed with those of a later step; None: none waits.
    waiting_from: int | None = None
    # First position whose row step 0 exports, and the prompt tokens that it did not run.
    rows_start: int = 0
    cached: int = 0
    # Leading positions whose KV was computed in chunks of the prompt; those behind, in blocks.
    prompt_end: int = 0
    parent: Session | None = None
    # Lower comes first, to run and to keep its pages: priority, then arrival.
    rank: tuple[int, int] = (0, 0)
    # When its turn for a prompt chunk came last, and its last step ended.
    turn: int = 0
    idle_since: float = 0.0
    # Those of the prompt as far as it has run, when asked for.
    prompt_scores: list[TokenLogprobs] = field(default_factory=list)
    # Id of the latest finished step; its answer, once that is written.
    done_step: int = -1
    answer: target_pb2.TargetReply | None = None
    # What its verdicts and their proposals begin with.
    blank: target_pb2.Verdict = field(init=False)
    blank_proposal: common_pb2.Proposal = field(init=False)
    # The step that waits for the engine or runs in it, and the one that came meanwhile.
    step: Step | None = None
    next: Step | None = None
    running: bool = False
    # Whose verdict waits for a draft service; how many ids that service was told of, what it had
    # when the run ahead began, and how often it was late in that run.
    held: Held | None = None
    told: int = 0
    told_first: int = 0
    late: int = 0
    finished: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        coordinator, session_id, generation = self.key
        key = common_pb2.SessionKey(
            coordinator=coordinator, session_id=session_id, generation=generation
        )
        self.blank, self.blank_proposal = target_pb2.Verdict(key=key), common_pb2.Proposal(key=key)

    @property
    def opening(self) -> bool:
        return self.done_step < 0

    @property
    def remaining(self) -> int:
        return self.spec.limit_len - len(self.ids)

    @property
    def kv(self) -> int:
        return self.table.length if self.table is not None else 0

    @property
    def filling(self) -> bool:
        """Prompt chunks come first: its first ones, or those that its pages were taken for."""
        if self.done_step < 0 or self.table is None:
            return True
        return self.table.length < len(self.ids) - 1

    @property
    def begun(self) -> bool:
        """In the middle of a step: no lease ends there."""
        begun = self.step is not None and self.step.started is not None
        return begun and self.table is not None

    @property
    def preempted(self) -> bool:
        """Gave its pages away after it had begun."""
        return self.table is None and self.computed is not None

    def renew(self, now: float, lease_s: float = 0.0) -> None:
        """The lease runs anew; `lease_s` changes its length."""
        self.lease_s = lease_s or self.lease_s
        self.lease_until = now + self.lease_s

    def drop_rows(self) -> None:
        """From now on nobody reads the session's rows, kept ones included, nor answers what it
        would ask. Safe to repeat."""
        if self.held is not None:
            self.held.settle(None)
        if self.sink is not None:
            self.sink.release()
            self.sink = None
        self.history.truncate(0)
        self.waiting_from = None

    def truncate(self, length: int) -> None:
        """Back to `length` committed tokens; the anchor's KV and rows go too."""
        assert not self.running and 0 < length <= len(self.ids)
        del self.ids[length:]
        if self.kv > length - 1:
            assert self.table is not None
            self.table.truncate(length - 1)
        # The anchor is run again in a block, even where it was part of the prompt.
        self.prompt_end = min(self.prompt_end, length - 1)
        self.history.truncate(length - 1)
        if self.waiting_from is not None and self.waiting_from >= length - 1:
            self.waiting_from = None
        self.finished = False
