"""A public request into a checked session. Refusals name field, value and what is accepted."""

from __future__ import annotations

import math
import secrets

from coordinator.placement import PLAIN, Choice, Group
from coordinator.session import SessionSpec
from coordinator.text import ROLES, TextModel
from specwire.errors import Reason, SpecwireError
from specwire.v1 import common_pb2, generate_pb2

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 256
_EXACTNESS = {
    "exact": common_pb2.EXACTNESS_EXACT,
    "fast": common_pb2.EXACTNESS_FAST,
}


def check(
    request: generate_pb2.GenerateRequest,
    fleet: Group,
    text: TextModel,
    deadline: float | None,
    traceparent: str = "",
) -> SessionSpec:
    assert fleet.target.info is not None
    model = fleet.target.info.model
    if request.model and request.model != model.name:
        raise SpecwireError.field("model", request.model, model.name, Reason.MODEL_UNKNOWN)
    prompt = _prompt(request, text, model)
    choice, k, adaptive = _speculation(request, fleet)
    return SessionSpec(
        prompt=tuple(prompt),
        sampling=_sampling(request.sampling),
        max_tokens=_max_tokens(request, len(prompt), model.max_length_tokens),
        stops=_stops(request),
        stop_token_ids=_stop_ids(request, model.vocab_size),
        ignore_eos=request.ignore_eos,
        exactness=_exactness(request.exactness, fleet),
        margins=request.return_margins,
        return_ids=request.return_token_ids,
        choice=choice,
        k=k,
        adaptive_k=adaptive,
        deadline=deadline,
        request_id=request.request_id,
        traceparent=traceparent,
    )


def _prompt(
    request: generate_pb2.GenerateRequest, text: TextModel, model: common_pb2.ModelInfo
) -> list[int]:
    kind = request.WhichOneof("input")
    if kind == "prompt":
        ids = text.encode(request.prompt, add_special_tokens=True) if request.prompt else []
    elif kind == "chat":
        ids = text.encode(_chat(request.chat, text), add_special_tokens=False)
    elif kind == "tokens":
        ids = list(request.tokens.ids)
        for index, token in enumerate(ids):
            if token >= model.vocab_size:
                accepted = f"ids below {model.vocab_size}, the vocabulary size"
                raise SpecwireError.field(
                    f"tokens.ids[{index}]", token, accepted, Reason.VOCAB_RANGE
                )
    else:
        raise SpecwireError.field("input", "absent", "one of prompt, chat, tokens")
    if not ids:
        raise SpecwireError.field(kind, "empty", "at least one token")
    if len(ids) >= model.max_length_tokens:
        accepted = f"fewer than {model.max_length_tokens} tokens, the model's maximum length"
        raise SpecwireError.field(kind, f"{len(ids)} tokens", accepted, Reason.PROMPT_TOO_LONG)
    return ids


def _chat(chat: generate_pb2.ChatInput, text: TextModel) -> str:
    if not chat.messages:
        raise SpecwireError.field("chat.messages", "empty", "at least one message")
    for index, message in enumerate(chat.messages):
        if message.role not in ROLES:
            field = f"chat.messages[{index}].role"
            raise SpecwireError.field(field, message.role, "one of " + ", ".join(ROLES))
    return text.render_chat([{"role": m.role, "content": m.content} for m in chat.messages])


def _sampling(given: common_pb2.Sampling) -> common_pb2.Sampling:
    """All fields set: the documented defaults where the request says nothing, the seed drawn."""
    temperature = given.temperature if given.HasField("temperature") else 1.0
    top_p = given.top_p if given.HasField("top_p") else 1.0
    if not math.isfinite(temperature) or temperature < 0:
        raise SpecwireError.field("sampling.temperature", temperature, "a finite number >= 0")
    if not 0 < top_p <= 1:  # NaN too
        raise SpecwireError.field("sampling.top_p", top_p, "more than 0, at most 1")
    return common_pb2.Sampling(
        temperature=temperature,
        top_k=given.top_k,
        top_p=top_p,
        seed=given.seed if given.HasField("seed") else secrets.randbits(63),
        choice=given.choice,
    )


def _max_tokens(request: generate_pb2.GenerateRequest, prompt: int, max_length: int) -> int:
    room = max_length - prompt
    if not request.HasField("max_tokens"):
        return room
    if not 1 <= request.max_tokens <= room:
        accepted = f"1 to {room} ({max_length} tokens in all, {prompt} of them the prompt's)"
        raise SpecwireError.field("max_tokens", request.max_tokens, accepted)
    return request.max_tokens


def _stops(request: generate_pb2.GenerateRequest) -> tuple[str, ...]:
    if len(request.stop) > MAX_STOPS:
        raise SpecwireError.field("stop", f"{len(request.stop)} strings", f"at most {MAX_STOPS}")
    for index, stop in enumerate(request.stop):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            accepted = f"1 to {MAX_STOP_CHARS} characters"
            raise SpecwireError.field(f"stop[{index}]", f"{len(stop)} characters", accepted)
    return tuple(request.stop)


def _stop_ids(request: generate_pb2.GenerateRequest, vocab_size: int) -> tuple[int, ...]:
    ids = request.stop_token_ids
    if len(ids) > MAX_STOP_IDS:
        raise SpecwireError.field("stop_token_ids", f"{len(ids)} ids", f"at most {MAX_STOP_IDS}")
    for index, token in enumerate(ids):
        if token >= vocab_size:
            accepted = f"ids below {vocab_size}, the vocabulary size"
            raise SpecwireError.field(
                f"stop_token_ids[{index}]", token, accepted, Reason.VOCAB_RANGE
            )
    return tuple(ids)


def _exactness(given: common_pb2.Exactness, fleet: Group) -> common_pb2.Exactness:
    if given in _EXACTNESS.values():
        return given
    if given != common_pb2.EXACTNESS_UNSPECIFIED:
        raise SpecwireError.field("exactness", given, "EXACT (1) or FAST (2)")
    assert fleet.target.info is not None
    return _EXACTNESS.get(fleet.settings.exactness, fleet.target.info.default_exactness)


def _speculation(
    request: generate_pb2.GenerateRequest, fleet: Group
) -> tuple[Choice | None, int, bool]:
    """The drafter, K, and whether K is only the most. Zero tokens a round is plain decoding.

    A request that names K gets exactly that many; one that does not leaves them to the policy.
    """
    wanted = request.speculation
    choice = fleet.choose(wanted.method or fleet.default_method())
    limit = choice.drafter.max_draft_tokens if choice is not None else 0
    if not wanted.HasField("num_speculative_tokens"):
        if fleet.settings.adaptive_k:
            return choice, limit, True
        return choice, min(fleet.settings.num_speculative_tokens, limit), False
    k = wanted.num_speculative_tokens
    field = "speculation.num_speculative_tokens"
    if choice is None:
        if k:
            raise SpecwireError.field(field, k, f"0 with method {PLAIN}")
        return None, 0, False
    if k > limit:
        accepted = f"0 to {limit}, the most that {choice.drafter.method} proposes"
        raise SpecwireError.field(field, k, accepted)
    return (choice, k, False) if k else (None, 0, False)
