"""A validated request, and the item that opens it at a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.answer import AnswerSpec
from coordinator.drafters import Wanted
from coordinator.record import remaining_ms
from coordinator.settings import CoordinatorSettings
from specwire.rpc import encode_ids
from specwire.v1 import common_pb2, target_pb2


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """A validated request. `deadline` is a time of the event loop's clock."""

    prompt: tuple[int, ...]
    answer: AnswerSpec
    # The drafter; None: plain.
    wanted: Wanted | None
    k: int
    deadline: float | None
    # How many answers were asked for; this is one of them.
    n: int = 1
    traceparent: str = ""
    # Whether `k` is only the most that a round may ask for.
    adaptive_k: bool = False


def open_target(
    spec: SessionSpec,
    settings: CoordinatorSettings,
    *,
    key: common_pb2.SessionKey,
    ids: Sequence[int],
    push_to: target_pb2.PushTo | None,
    colocated: target_pb2.ColocatedDraft | None,
    rows_from: int,
    free_run: int,
    fork_of: common_pb2.SessionKey | None,
) -> target_pb2.OpenTarget:
    """Opens the session with `ids`, the prompt and what was committed since; what belongs to the
    prompt is asked for only while that is nothing."""
    answer, emitted = spec.answer, len(ids) - len(spec.prompt)
    return target_pb2.OpenTarget(
        key=key,
        ids=encode_ids(ids),
        prompt_len=len(spec.prompt),
        sampling=answer.sampling,
        stop_token_ids=answer.stop_token_ids,
        ignore_eos=answer.ignore_eos,
        max_new_tokens=answer.max_tokens - emitted,
        exactness=answer.exactness,
        push_to=push_to,
        colocated=colocated,
        rows_from=rows_from if push_to is not None else 0,
        row_window=settings.row_window,
        lease_ms=settings.lease_ms,
        deadline_ms=remaining_ms(spec.deadline),
        traceparent=spec.traceparent,
        report_margins=answer.margins,
        free_run=free_run,
        fork_of=fork_of,
        priority=answer.priority,
        logprobs=answer.logprobs,
        prompt_logprobs=None if emitted else answer.prompt_logprobs,
    )
