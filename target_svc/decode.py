"""Items from the wire into checked values. What a client gets wrong is refused by field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine import api
from specwire.errors import Reason, SpecwireError
from specwire.rpc import decode_ids
from specwire.sampling import (
    check_stop_ids,
    checked_logprobs,
    checked_prompt_logprobs,
    complete,
)
from specwire.v1 import common_pb2, target_pb2
from target_svc.row_formats import checked_taps
from target_svc.sessions import Key, OpenSpec
from target_svc.settings import TargetSettings

_UINT64 = 2**64


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded engine and the settings accept."""

    vocab_size: int
    hidden_size: int
    layer_count: int
    max_length: int
    eos_ids: frozenset[int]
    max_draft_tokens: int
    exact_default: bool
    lease_ms: int
    row_window: int
    projection: api.Projection | None = None
    # The co-located drafter and the most tokens of its proposals; "": none.
    drafter: str = ""
    drafter_tokens: int = 0

    @classmethod
    def of(
        cls, info: api.ModelInfo, settings: TargetSettings, drafter: api.Drafter | None = None
    ) -> Limits:
        return cls(
            vocab_size=info.vocab_size,
            hidden_size=info.hidden_size,
            layer_count=info.layer_count,
            max_length=info.max_length,
            eos_ids=frozenset(info.eos_token_ids),
            max_draft_tokens=settings.max_draft_tokens,
            exact_default=settings.exactness == "exact",
            lease_ms=settings.lease_ms,
            row_window=settings.row_history_tokens,
            projection=info.projection,
            drafter=drafter.method if drafter is not None else "",
            drafter_tokens=drafter.max_draft_tokens if drafter is not None else 0,
        )


def key_of(key: common_pb2.SessionKey) -> Key:
    if not key.coordinator:
        raise SpecwireError.field("key.coordinator", 0, "a nonzero incarnation")
    return Key(key.coordinator, key.session_id, key.generation)


def key_to_wire(key: Key) -> common_pb2.SessionKey:
    return common_pb2.SessionKey(
        coordinator=key.coordinator, session_id=key.session_id, generation=key.generation
    )


def open_spec(request: target_pb2.OpenTarget, limits: Limits) -> OpenSpec:
    ids = _prompt(request, limits)
    if not request.max_new_tokens:
        raise SpecwireError.field("max_new_tokens", request.max_new_tokens, "1 or more")
    if request.prompt_len > len(ids):
        accepted = f"0 (all) to {len(ids)}, the number of ids"
        raise SpecwireError.field("prompt_len", request.prompt_len, accepted)
    if request.rows_from > len(ids):
        accepted = f"0 to {len(ids)}, the number of ids"
        raise SpecwireError.field("rows_from", request.rows_from, accepted)
    stop_ids = frozenset(check_stop_ids(request.stop_token_ids, limits.vocab_size))
    draft_tokens = _colocated(request, limits)
    whole = request.HasField("prompt_logprobs")
    return OpenSpec(
        ids=ids,
        prompt_len=request.prompt_len or len(ids),
        limit_len=min(len(ids) + request.max_new_tokens, limits.max_length),
        sampling=_sampling(request.sampling, stop_ids | limits.eos_ids, limits.vocab_size),
        stop_ids=stop_ids if request.ignore_eos else stop_ids | limits.eos_ids,
        exact=_exact(request.exactness, limits),
        margins=request.report_margins,
        logprobs=_logprobs(request, "logprobs"),
        prompt_logprobs=checked_prompt_logprobs(
            _logprobs(request, "prompt_logprobs"), request.prompt_len or len(ids)
        ),
        taps=_taps(request.push_to, limits) if request.HasField("push_to") else (),
        projected=request.push_to.format.encoding == common_pb2.ROW_ENCODING_PROJECTED,
        rows_from=request.rows_from,
        lease_s=(request.lease_ms or limits.lease_ms) / 1000,
        free_run=request.free_run,
        row_window=request.row_window or limits.row_window,
        # Tokens that do not run have no log probabilities: such a prompt runs whole.
        fork_of=None if whole or not request.HasField("fork_of") else key_of(request.fork_of),
        priority=request.priority,
        takes_prefix=not (request.no_prefix_cache or whole),
        publishes=not request.no_prefix_cache,
        draft_tokens=draft_tokens,
        then_propose=request.colocated.then_propose,
    )


def _colocated(request: target_pb2.OpenTarget, limits: Limits) -> int:
    """Most tokens that the co-located drafter may propose; 0: the session has none."""
    if not request.HasField("colocated"):
        return 0
    asked = request.colocated
    if request.HasField("push_to"):
        accepted = "a drafter in the target's process, or rows that go elsewhere (push_to)"
        raise SpecwireError.field("colocated", "with push_to", accepted)
    if not limits.drafter:
        text = "colocated: no drafter is co-located with this target"
        raise SpecwireError(Reason.UNSUPPORTED, text)
    if asked.method not in ("", limits.drafter):
        raise SpecwireError.field(
            "colocated.method", asked.method, limits.drafter, Reason.METHOD_UNKNOWN
        )
    # A run ahead verifies what is proposed: never more than a step takes.
    most = min(limits.drafter_tokens, limits.max_draft_tokens)
    return min(asked.max_draft_tokens or most, most)


def check_asking(request: target_pb2.Verify, colocated: bool, pushes: bool) -> None:
    """That a session has somebody who proposes: a co-located drafter, or a draft service that its
    rows go to, which is asked in a run ahead only."""
    if colocated:
        return
    if not pushes:
        text = "then_propose: the session was opened without a co-located drafter or push_to"
        raise SpecwireError(Reason.UNSUPPORTED, text)
    if not request.drafts_ahead:
        accepted = "0 where a draft service proposes, but with drafts_ahead"
        raise SpecwireError.field("then_propose", request.then_propose, accepted)
    if not request.draft_wait_us:
        raise SpecwireError.field("draft_wait_us", 0, "1 or more where a draft service proposes")


def _prompt(request: target_pb2.OpenTarget, limits: Limits) -> tuple[int, ...]:
    ids = tuple(decode_ids(request.ids))
    if not ids:
        raise SpecwireError.field("ids", "empty", "at least one token id")
    if len(ids) >= limits.max_length:
        accepted = f"fewer than {limits.max_length} tokens, the target's maximum length"
        raise SpecwireError.field("ids", f"{len(ids)} tokens", accepted, Reason.PROMPT_TOO_LONG)
    if max(ids) >= limits.vocab_size:
        accepted = f"ids below {limits.vocab_size}, the vocabulary size"
        raise SpecwireError.field("ids", max(ids), accepted, Reason.VOCAB_RANGE)
    return ids


def _sampling(
    message: common_pb2.Sampling, stop_ids: frozenset[int], vocab_size: int
) -> api.Sampling:
    """`stop_ids` may not come early, even where eos does not end the session."""
    given = complete(message, vocab_size)
    if given.temperature > 0 and not given.HasField("seed"):
        # Drawn here it would differ after a re-open, and the text with it.
        raise SpecwireError.field("sampling.seed", "absent", "a seed, unless the temperature is 0")
    return api.Sampling(
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        seed=given.seed % _UINT64,
        choice=given.choice,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        logit_bias=tuple(sorted(given.logit_bias.items())),
        bad_sequences=tuple(tuple(sequence.ids) for sequence in given.bad_sequences),
        min_tokens=given.min_tokens,
        stop_ids=tuple(sorted(stop_ids)) if given.min_tokens else (),
    )


def _logprobs(
    request: target_pb2.OpenTarget, name: Literal["logprobs", "prompt_logprobs"]
) -> int | None:
    return checked_logprobs(name, getattr(request, name)) if request.HasField(name) else None


def _exact(value: int, limits: Limits) -> bool:
    if value == common_pb2.EXACTNESS_UNSPECIFIED:
        return limits.exact_default
    if value not in (common_pb2.EXACTNESS_EXACT, common_pb2.EXACTNESS_FAST):
        raise SpecwireError.field("exactness", value, "EXACT (1) or FAST (2)")
    return value == common_pb2.EXACTNESS_EXACT


def _taps(push_to: target_pb2.PushTo, limits: Limits) -> tuple[int, ...]:
    return checked_taps(push_to.format, limits.hidden_size, limits.layer_count, limits.projection)
