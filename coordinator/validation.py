"""A public request into a checked session. Refusals name field, value and what is accepted."""

from __future__ import annotations

import secrets
from typing import Literal

from coordinator.answer import AnswerSpec
from coordinator.drafters import PLAIN, Wanted
from coordinator.placement import Group
from coordinator.spec import SessionSpec
from coordinator.text import ROLES, TextModel
from specwire.errors import Reason, SpecwireError
from specwire.sampling import (
    MAX_CHOICES,
    check_stop_ids,
    checked_logprobs,
    checked_prompt_logprobs,
    complete,
)
from specwire.v1 import common_pb2, generate_pb2

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 256
MAX_PRIORITY = 1000
# Above, a text is worth a thread: 4 MiB of it take seconds to tokenise.
LONG_TEXT_CHARS = 16_384
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
    prompt: list[int] | None = None,
) -> SessionSpec:
    """`prompt`: what `prompt_ids` made of this request before."""
    assert fleet.target.info is not None
    model = fleet.target.info.model
    if request.model and request.model != model.name:
        raise SpecwireError.field("model", request.model, model.name, Reason.MODEL_UNKNOWN)
    if request.HasField("structured_output"):
        kind = request.structured_output.WhichOneof("kind") or "of no kind"
        accepted = "absent: structured output is not built"
        raise SpecwireError.field("structured_output", kind, accepted, Reason.UNSUPPORTED)
    n = _n(request)
    prompt = prompt_ids(request, text, model) if prompt is None else prompt
    wanted, k, adaptive = _speculation(request, fleet)
    answer = _answer(request, fleet, text, model, len(prompt))
    return SessionSpec(tuple(prompt), answer, wanted, k, deadline, n, traceparent, adaptive)


def _n(request: generate_pb2.GenerateRequest) -> int:
    n = request.n if request.HasField("n") else 1
    if not 1 <= n <= MAX_CHOICES:
        raise SpecwireError.field("n", n, f"1 to {MAX_CHOICES}")
    if n > 1 and request.sampling.choice:
        accepted = "absent with n above 1: the choices are 0 to n - 1"
        raise SpecwireError.field("sampling.choice", request.sampling.choice, accepted)
    return n


def _answer(
    request: generate_pb2.GenerateRequest,
    fleet: Group,
    text: TextModel,
    model: common_pb2.ModelInfo,
    prompt_tokens: int,
) -> AnswerSpec:
    max_tokens = _max_tokens(request, prompt_tokens, model.max_length_tokens)
    return AnswerSpec(
        sampling=_sampling(request, text, model.vocab_size, max_tokens),
        max_tokens=max_tokens,
        stops=_stops(request),
        stop_token_ids=check_stop_ids(request.stop_token_ids, model.vocab_size),
        ignore_eos=request.ignore_eos,
        include_stop=request.include_stop,
        bad_words=tuple(request.bad_words),
        exactness=_exactness(request.exactness, fleet),
        margins=request.return_margins,
        return_ids=request.return_token_ids,
        logprobs=_logprobs(request, "logprobs"),
        prompt_logprobs=checked_prompt_logprobs(
            _logprobs(request, "prompt_logprobs"), prompt_tokens
        ),
        priority=_priority(request),
        request_id=request.request_id,
    )


def is_long(request: generate_pb2.GenerateRequest) -> bool:
    """Whether `prompt_ids` of this request takes longer than others should wait."""
    chat = sum(len(message.content) + 1 for message in request.chat.messages)
    return len(request.prompt) + chat > LONG_TEXT_CHARS


def prompt_ids(
    request: generate_pb2.GenerateRequest, text: TextModel, model: common_pb2.ModelInfo
) -> list[int]:
    """The prompt's tokens, checked. May run on any thread."""
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


def _sampling(
    request: generate_pb2.GenerateRequest, text: TextModel, vocab_size: int, max_tokens: int
) -> common_pb2.Sampling:
    """All fields set: the documented defaults where the request says nothing, the seed drawn."""
    given = common_pb2.Sampling()
    given.CopyFrom(request.sampling)
    for ids in _bad_words(request, text):
        given.bad_sequences.add(ids=ids)
    made = complete(given, vocab_size)
    if made.min_tokens > max_tokens:
        accepted = f"0 to {max_tokens}, the most tokens of the answer"
        raise SpecwireError.field("sampling.min_tokens", made.min_tokens, accepted)
    if not made.HasField("seed"):
        made.seed = secrets.randbits(63)
    return made


def _bad_words(request: generate_pb2.GenerateRequest, text: TextModel) -> list[tuple[int, ...]]:
    """Token sequences of each word, as it starts a text and as it follows a space."""
    if len(request.bad_words) > MAX_BAD_WORDS:
        words = f"{len(request.bad_words)} words"
        raise SpecwireError.field("bad_words", words, f"at most {MAX_BAD_WORDS}")
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(request.bad_words):
        if not (word.strip() and len(word) <= MAX_BAD_WORD_CHARS):
            accepted = f"1 to {MAX_BAD_WORD_CHARS} characters, not only spaces"
            raise SpecwireError.field(f"bad_words[{index}]", f"{len(word)} characters", accepted)
        forms = (word, " " + word.lstrip())
        found |= {tuple(text.encode(form, add_special_tokens=False)): None for form in forms}
    return [ids for ids in found if ids]


def _logprobs(
    request: generate_pb2.GenerateRequest, name: Literal["logprobs", "prompt_logprobs"]
) -> int | None:
    return checked_logprobs(name, getattr(request, name)) if request.HasField(name) else None


def _priority(request: generate_pb2.GenerateRequest) -> int:
    if abs(request.priority) > MAX_PRIORITY:
        raise SpecwireError.field(
            "priority", request.priority, f"{-MAX_PRIORITY} to {MAX_PRIORITY}"
        )
    return request.priority


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


def _exactness(given: common_pb2.Exactness, fleet: Group) -> common_pb2.Exactness:
    if given in _EXACTNESS.values():
        return given
    if given != common_pb2.EXACTNESS_UNSPECIFIED:
        raise SpecwireError.field("exactness", given, "EXACT (1) or FAST (2)")
    assert fleet.target.info is not None
    return _EXACTNESS.get(fleet.settings.exactness, fleet.target.info.default_exactness)


def _speculation(
    request: generate_pb2.GenerateRequest, fleet: Group
) -> tuple[Wanted | None, int, bool]:
    """The drafter, K, and whether K is only the most. Zero tokens a round is plain decoding.

    A request that names K gets exactly that many; one that does not leaves them to the policy.
    """
    given, offers = request.speculation, fleet.offers
    name = given.method or offers.default_method()
    choice = offers.choose(name)
    wanted = Wanted.parse(name) if choice is not None else None
    limit = choice.drafter.max_draft_tokens if choice is not None else 0
    if not given.HasField("num_speculative_tokens"):
        if fleet.settings.adaptive_k:
            return wanted, limit, True
        return wanted, min(fleet.settings.num_speculative_tokens, limit), False
    k = given.num_speculative_tokens
    field = "speculation.num_speculative_tokens"
    if choice is None:
        if k:
            raise SpecwireError.field(field, k, f"0 with method {PLAIN}")
        return None, 0, False
    if k > limit:
        accepted = f"0 to {limit}, the most that {choice.drafter.method} proposes"
        raise SpecwireError.field(field, k, accepted)
    return (wanted, k, False) if k else (None, 0, False)
