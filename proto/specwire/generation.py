"""What the SDK returns, as plain typed objects; no protobuf message reaches a user."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from specwire.request import EXACTNESS
from specwire.v1 import common_pb2, generate_pb2


class FinishReason(StrEnum):
    UNKNOWN = "unknown"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CANCELLED = "cancelled"


_FINISH = {
    common_pb2.FINISH_REASON_STOP_TOKEN: FinishReason.STOP_TOKEN,
    common_pb2.FINISH_REASON_STOP_STRING: FinishReason.STOP_STRING,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}
_MAPPINGS = ("fallbacks", "phase_ms", "accepted_by_source")
_EXACTNESS_NAMES = {value: name for name, value in EXACTNESS.items()}


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token_id: int
    logprob: float
    text: str


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How probable a token was before any sampling option; rank 1 is the most probable. `top` are
    the alternatives asked for, highest first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[TopLogprob, ...]
    text: str


@dataclass(frozen=True, slots=True)
class AcceptedSpan:
    """Tokens of a delta, and the characters of its text, that were the draft's."""

    start: int
    count: int
    start_char: int
    chars: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and its tokens; the first `accepted_count` of them were the draft's.

    `choice` tells which of the `n` answers goes on. `logprobs`: one per token, when asked for.
    A delta may hold several rounds, those that came while the ones before were on their way: then
    `later_accepted` are the draft's tokens behind the first round.
    """

    text: str
    token_ids: tuple[int, ...]
    accepted_count: int
    accepted_chars: int
    margins: tuple[float, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    choice: int = 0
    later_accepted: tuple[AcceptedSpan, ...] = ()

    @property
    def accepted(self) -> tuple[AcceptedSpan, ...]:
        """All of the draft's tokens, in order."""
        first = AcceptedSpan(0, self.accepted_count, 0, self.accepted_chars)
        return (first, *self.later_accepted) if self.accepted_count else self.later_accepted


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What speculation did; `tau` is tokens emitted per verify step."""

    method: str = ""
    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    tau: float = 0.0
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    fallbacks: dict[str, int] = field(default_factory=dict)
    phase_ms: dict[str, float] = field(default_factory=dict)
    per_step_drafted: tuple[int, ...] = ()
    per_step_accepted: tuple[int, ...] = ()
    ttft_ms: float = 0.0
    total_ms: float = 0.0
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    target_moves: int = 0
    # Where the drafter was, at last: "separate", "colocated", or nowhere.
    placement: str = ""
    # Per verify step: from the verdict before to its own, less what target and draft computed.
    per_step_outside_us: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling as the server applied it."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    choice: int
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    # Those of `bad_words` included.
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Ended:
    """How an answer ended, and what was applied."""

    finish_reason: FinishReason
    stop_string: str
    stop_token_id: int | None
    usage: Usage
    acceptance: Acceptance
    sampling: Sampling
    request_id: str
    exactness: str
    choice: int = 0
    max_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    priority: int = 0
    # From the second prompt token on, when asked for; with choice 0 only.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished(_Ended):
    """The last event of a stream."""


Event = Delta | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation(_Ended):
    """A whole generation: what the deltas said, how it ended, and what was applied.

    With `n` above 1 this is choice 0, and `others` are the rest; `choices` are all, in order.
    """

    text: str
    token_ids: tuple[int, ...]
    margins: tuple[float, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    others: tuple[Generation, ...] = ()

    @property
    def choices(self) -> tuple[Generation, ...]:
        return (self, *self.others)

    @property
    def total_usage(self) -> Usage:
        """Of all choices; their common prompt counts once."""
        completion = sum(choice.usage.completion_tokens for choice in self.choices)
        return replace(self.usage, completion_tokens=completion)


def event_from(response: generate_pb2.GenerateResponse) -> Event | None:
    """The typed event; None for a kind that this version does not know."""
    kind = response.WhichOneof("event")
    if kind == "delta":
        delta = response.delta
        return Delta(
            text=delta.text,
            token_ids=tuple(delta.token_ids),
            accepted_count=delta.accepted_count,
            accepted_chars=delta.accepted_chars,
            margins=tuple(delta.margins),
            logprobs=_logprobs(delta.logprobs),
            choice=response.choice,
            later_accepted=tuple(
                AcceptedSpan(s.start, s.count, s.start_char, s.chars) for s in delta.later_accepted
            ),
        )
    return _finished(response.finished, response.choice) if kind == "finished" else None


def _logprobs(scored: Iterable[common_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            token_id=token.token_id,
            logprob=token.logprob,
            rank=token.rank,
            top=tuple(TopLogprob(t.token_id, t.logprob, t.text) for t in token.top),
            text=token.text,
        )
        for token in scored
    )


def _finished(message: generate_pb2.Finished, choice: int) -> Finished:
    return Finished(
        finish_reason=_FINISH.get(message.reason, FinishReason.UNKNOWN),
        stop_string=message.stop_string,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        usage=Usage(
            message.usage.prompt_tokens,
            message.usage.completion_tokens,
            message.usage.cached_prompt_tokens,
        ),
        acceptance=_acceptance(message.acceptance),
        sampling=_sampling(message.sampling),
        request_id=message.request_id,
        exactness=_EXACTNESS_NAMES.get(message.exactness, ""),
        choice=choice,
        max_tokens=message.max_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        bad_words=tuple(message.bad_words),
        priority=message.priority,
        prompt_logprobs=_logprobs(message.prompt_logprobs),
    )


def _sampling(message: common_pb2.Sampling) -> Sampling:
    """What an older server left out is at its documented default, as here."""
    present = {field.name: value for field, value in message.ListFields()}
    present["logit_bias"] = dict(message.logit_bias)
    present["bad_sequences"] = tuple(tuple(sequence.ids) for sequence in message.bad_sequences)
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 0, "choice": 0}
    values = defaults | present
    return Sampling(
        **{item.name: values[item.name] for item in fields(Sampling) if item.name in values}
    )


def _acceptance(record: generate_pb2.AcceptanceRecord) -> Acceptance:
    # Both sides use the same field names; only the containers differ.
    values: dict[str, Any] = {}
    for item in fields(Acceptance):
        value = getattr(record, item.name)
        if not isinstance(value, (str, int, float)):
            value = dict(value) if item.name in _MAPPINGS else tuple(value)
        values[item.name] = value
    return Acceptance(**values)


def collect(events: Sequence[Event]) -> Generation:
    """The whole of a stream that has ended: every choice has its `Finished`."""
    ends = {event.choice: event for event in events if isinstance(event, Finished)}
    made = [_joined(events, ends[choice]) for choice in sorted(ends)]
    return replace(made[0], others=tuple(made[1:]))


def _joined(events: Sequence[Event], end: Finished) -> Generation:
    """One choice's deltas put together."""
    deltas = [e for e in events if isinstance(e, Delta) and e.choice == end.choice]
    return Generation(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(i for delta in deltas for i in delta.token_ids),
        margins=tuple(m for delta in deltas for m in delta.margins),
        logprobs=tuple(scored for delta in deltas for scored in delta.logprobs),
        **{item.name: getattr(end, item.name) for item in fields(Finished)},
    )
