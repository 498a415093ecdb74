"""What the SDK sends and returns, as plain typed objects; no protobuf message reaches a user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, TypedDict

from specwire.errors import SpecwireError
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
_EXACTNESS = {
    "": common_pb2.EXACTNESS_UNSPECIFIED,
    "exact": common_pb2.EXACTNESS_EXACT,
    "fast": common_pb2.EXACTNESS_FAST,
}
_EXACTNESS_NAMES = {value: name for name, value in _EXACTNESS.items()}


class GenerateOptions(TypedDict, total=False):
    """Arguments of `generate` and `stream`: one of prompt, messages, token_ids; the rest optional.

    What is left out, or None, takes the server's documented default.
    """

    prompt: str | None
    messages: Sequence[Mapping[str, str]] | None
    token_ids: Sequence[int] | None
    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None
    choice: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    method: str
    num_speculative_tokens: int | None
    exactness: str
    timeout_s: float | None
    return_token_ids: bool
    return_margins: bool
    model: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and its tokens; the first `accepted_count` of them were the draft's."""

    text: str
    token_ids: tuple[int, ...]
    accepted_count: int
    accepted_chars: int
    margins: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0


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


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling as the server applied it."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    choice: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a stream."""

    finish_reason: FinishReason
    stop_string: str
    stop_token_id: int | None
    usage: Usage
    acceptance: Acceptance
    sampling: Sampling
    request_id: str
    exactness: str


Event = Delta | Finished


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole generation: what the deltas said, and how it ended."""

    text: str
    token_ids: tuple[int, ...]
    margins: tuple[float, ...]
    finish_reason: FinishReason
    stop_string: str
    stop_token_id: int | None
    usage: Usage
    acceptance: Acceptance
    sampling: Sampling
    request_id: str
    exactness: str


def build_request(options: GenerateOptions) -> generate_pb2.GenerateRequest:
    """The wire form of the arguments. Names what cannot travel; judging values is the server's."""
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        accepted = ", ".join(GenerateOptions.__annotations__)
        raise SpecwireError.field("argument", min(unknown), accepted)
    exactness = options.get("exactness", "")
    if exactness not in _EXACTNESS:
        raise SpecwireError.field("exactness", exactness, "'exact', 'fast' or '' (the default)")
    request = generate_pb2.GenerateRequest(
        exactness=_EXACTNESS[exactness],
        return_token_ids=options.get("return_token_ids", True),
    )
    _set_input(request, options)
    for name in ("request_id", "model", "ignore_eos", "return_margins", "max_tokens"):
        _assign(request, name, options)
    for name in ("temperature", "top_k", "top_p", "seed", "choice"):
        _assign(request.sampling, name, options)
    for name in ("method", "num_speculative_tokens"):
        _assign(request.speculation, name, options)
    stop = options.get("stop", ())
    _extend(request.stop, "stop", (stop,) if isinstance(stop, str) else stop, "strings")
    stop_ids = options.get("stop_token_ids", ())
    _extend(request.stop_token_ids, "stop_token_ids", stop_ids, "token ids")
    return request


def _set_input(request: generate_pb2.GenerateRequest, options: GenerateOptions) -> None:
    names = ("prompt", "messages", "token_ids")
    given = [name for name in names if options.get(name) is not None]
    if len(given) != 1:
        shown = " and ".join(given) or "missing"
        raise SpecwireError.field("input", shown, "exactly one of prompt, messages, token_ids")
    if given == ["token_ids"]:
        request.tokens.SetInParent()
        _extend(request.tokens.ids, "token_ids", options["token_ids"] or (), "token ids")
        return
    try:  # the text itself must not get into an error message
        if given == ["prompt"]:
            request.prompt = options["prompt"] or ""
            return
        request.chat.SetInParent()
        for message in options["messages"] or ():
            request.chat.messages.add(role=message["role"], content=message["content"])
    except (TypeError, ValueError, KeyError):
        accepted = "text in valid Unicode; messages are mappings with `role` and `content`"
        raise SpecwireError.field(given[0], "of another form", accepted) from None


def _assign(message: Any, name: str, options: GenerateOptions) -> None:
    value = options.get(name)
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise SpecwireError.field(name, value, str(error)) from None


def _extend(target: Any, name: str, values: Iterable[Any], accepted: str) -> None:
    try:
        target.extend(values)
    except (TypeError, ValueError):
        raise SpecwireError.field(name, "of another form", f"a sequence of {accepted}") from None


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
        )
    return _finished(response.finished) if kind == "finished" else None


def _finished(message: generate_pb2.Finished) -> Finished:
    sampling = message.sampling
    return Finished(
        finish_reason=_FINISH.get(message.reason, FinishReason.UNKNOWN),
        stop_string=message.stop_string,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        usage=Usage(message.usage.prompt_tokens, message.usage.completion_tokens),
        acceptance=_acceptance(message.acceptance),
        sampling=Sampling(
            temperature=sampling.temperature if sampling.HasField("temperature") else 1.0,
            top_k=sampling.top_k,
            top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
            seed=sampling.seed,
            choice=sampling.choice,
        ),
        request_id=message.request_id,
        exactness=_EXACTNESS_NAMES.get(message.exactness, ""),
    )


def _acceptance(record: generate_pb2.AcceptanceRecord) -> Acceptance:
    # Both sides use the same field names; only the containers differ.
    values: dict[str, Any] = {}
    for item in fields(Acceptance):
        value = getattr(record, item.name)
        if not isinstance(value, (str, int, float)):
            value = dict(value) if item.name in ("fallbacks", "phase_ms") else tuple(value)
        values[item.name] = value
    return Acceptance(**values)


def collect(events: Sequence[Event]) -> Generation:
    """The whole of a stream that has ended; its last event is `Finished`."""
    deltas = [event for event in events if isinstance(event, Delta)]
    ends = [event for event in events if isinstance(event, Finished)]
    return Generation(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(i for delta in deltas for i in delta.token_ids),
        margins=tuple(m for delta in deltas for m in delta.margins),
        **{item.name: getattr(ends[-1], item.name) for item in fields(Finished)},
    )
