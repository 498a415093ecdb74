"""What the SDK sends: the arguments of a generation, and their wire form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from specwire.errors import Reason, SpecwireError
from specwire.v1 import common_pb2, generate_pb2

EXACTNESS = {
    "": common_pb2.EXACTNESS_UNSPECIFIED,
    "exact": common_pb2.EXACTNESS_EXACT,
    "fast": common_pb2.EXACTNESS_FAST,
}
_REQUEST_FIELDS = (
    "request_id",
    "model",
    "ignore_eos",
    "include_stop",
    "return_token_ids",
    "return_margins",
    "max_tokens",
    "n",
    "logprobs",
    "prompt_logprobs",
    "priority",
)
_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "choice",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)
_MESSAGES = "mappings with `role` and `content`, both text"
_STRUCTURED = "one of json_schema, json_object, regex, grammar, choice, with its value"


class GenerateOptions(TypedDict, total=False):
    """Arguments of `generate` and `stream`: one of prompt, messages, token_ids; the rest optional.

    What is left out, or None, takes the server's documented default. `Client.generate` says what
    each of them means.
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
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    bad_sequences: Sequence[Sequence[int]]
    min_tokens: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop: bool
    n: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    priority: int | None
    structured_output: Mapping[str, Any] | None
    method: str
    num_speculative_tokens: int | None
    exactness: str
    timeout_s: float | None
    return_token_ids: bool
    return_margins: bool
    model: str
    request_id: str


def with_prompt(prompt: str | None, options: GenerateOptions) -> GenerateOptions:
    """The arguments with a prompt that was given without its name."""
    if prompt is None:
        return options
    if options.get("prompt") is not None:
        raise SpecwireError.field("input", "prompt twice", "one prompt, with its name or without")
    return {**options, "prompt": prompt}


def build_request(options: GenerateOptions) -> generate_pb2.GenerateRequest:
    """The wire form of the arguments. Names what cannot travel; judging values is the server's."""
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        accepted = ", ".join(GenerateOptions.__annotations__)
        raise SpecwireError.field("argument", min(unknown), accepted)
    request = generate_pb2.GenerateRequest(return_token_ids=True)
    request.exactness = _exactness(options.get("exactness"))
    _set_input(request, options)
    for name in _REQUEST_FIELDS:
        _assign(request, name, options)
    for name in _SAMPLING_FIELDS:
        _assign(request.sampling, name, options)
    _set_maps(request.sampling, options)
    for name in ("method", "num_speculative_tokens"):
        _assign(request.speculation, name, options)
    _extend(request.stop, "stop", options.get("stop"), "strings")
    _extend(request.stop_token_ids, "stop_token_ids", options.get("stop_token_ids"), "token ids")
    _extend(request.bad_words, "bad_words", options.get("bad_words"), "strings")
    _set_structured(request, options.get("structured_output"))
    return request


def _exactness(wanted: str | None) -> common_pb2.Exactness:
    name = "" if wanted is None else wanted
    if not isinstance(name, str) or name not in EXACTNESS:
        raise SpecwireError.field("exactness", name, "'exact', 'fast' or '' (the default)")
    return EXACTNESS[name]


def _set_maps(sampling: common_pb2.Sampling, options: GenerateOptions) -> None:
    try:
        sampling.logit_bias.update(options.get("logit_bias") or {})
    except (TypeError, ValueError, AttributeError, OverflowError):
        accepted = "a mapping of token ids to numbers"
        raise SpecwireError.field("logit_bias", "of another form", accepted) from None
    sequences, accepted = options.get("bad_sequences"), "sequences of token ids"
    if sequences is not None and not isinstance(sequences, Iterable):
        raise SpecwireError.field("bad_sequences", "of another form", f"a sequence of {accepted}")
    for ids in sequences or ():
        _extend(sampling.bad_sequences.add().ids, "bad_sequences", ids, accepted)


def _set_structured(
    request: generate_pb2.GenerateRequest, wanted: Mapping[str, Any] | None
) -> None:
    """One kind and its value, as {"json_schema": "..."}. Whether it is built, the server says."""
    if wanted is None:
        return
    if not isinstance(wanted, Mapping):
        raise SpecwireError.field("structured_output", "of another form", _STRUCTURED)
    message = request.structured_output
    message.SetInParent()
    for kind, value in wanted.items():
        try:
            if kind == "choice":
                message.choice.values.extend(value)
            else:
                setattr(message, kind, value)
        except (AttributeError, TypeError, ValueError):
            raise SpecwireError.field("structured_output", kind, _STRUCTURED) from None


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
    if given == ["prompt"]:
        request.prompt = _text("prompt", options["prompt"])
        return
    messages: Any = options["messages"]
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise _not("messages", f"is of type {type(messages).__name__}", f"a list of {_MESSAGES}")
    request.chat.SetInParent()
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise _not(field, f"is of type {type(message).__name__}", f"one of {_MESSAGES}")
        for key in ("role", "content"):
            if key not in message:
                raise _not(field, f"has no {key}", f"one of {_MESSAGES}")
        role, content = (_text(f"{field}.{key}", message[key]) for key in ("role", "content"))
        request.chat.messages.add(role=role, content=content)


def _text(field: str, value: Any) -> str:
    """What is text and can travel. The text itself must not get into an error message."""
    accepted = "text in valid Unicode"
    if not isinstance(value, str):
        if field == "prompt":
            accepted += "; ids of tokens go into token_ids"
        raise _not(field, f"is of type {type(value).__name__}", accepted)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _not(field, "has lone surrogates", accepted) from None
    return value


def _not(field: str, problem: str, accepted: str) -> SpecwireError:
    values = {"field": field, "value": problem, "accepted": accepted}
    message = f"{field} {problem}; accepted: {accepted}"
    return SpecwireError(Reason.FIELD_INVALID, message, values)


def _assign(message: Any, name: str, options: GenerateOptions) -> None:
    value = options.get(name)
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError, OverflowError):
        raise SpecwireError.field(name, value, _holds(message, name)) from None


def _holds(message: Any, name: str) -> str:
    """What the wire's field can hold."""
    field = message.DESCRIPTOR.fields_by_name[name]
    others = {
        field.CPPTYPE_BOOL: "true or false",
        field.CPPTYPE_STRING: "text in valid Unicode",
        field.CPPTYPE_DOUBLE: "a number",
        field.CPPTYPE_FLOAT: "a number",
    }
    if field.cpp_type in others:
        return others[field.cpp_type]
    bits = 32 if field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32) else 64
    if field.cpp_type in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64):
        return f"an integer, 0 to {2**bits - 1}"
    return f"an integer, {-(2 ** (bits - 1))} to {2 ** (bits - 1) - 1}"


def _extend(target: Any, name: str, values: Iterable[Any] | None, accepted: str) -> None:
    """One string stands for a sequence of it."""
    if values is None:
        return
    try:
        target.extend((values,) if isinstance(values, str) else values)
    except (TypeError, ValueError):
        raise SpecwireError.field(name, "of another form", f"a sequence of {accepted}") from None
