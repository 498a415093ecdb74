"""What `specwire plan` computes with: step times and limits, as given on the command line or as
running workers tell in GetInfo.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from coordinator.costs import Cost, from_wire
from coordinator.footprint import Footprint
from coordinator.row_format import row_format
from coordinator.topology import StepTimes, Work, tau
from specwire.errors import Reason, SpecwireError, from_rpc_error
from specwire.rpc import ADDRESSES, channel_options, is_address
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

_TIMEOUT_S, _PINGS = 10.0, 10
_MOST_K = 64
_FLOAT32 = common_pb2.DType.D_TYPE_FLOAT32


@dataclass(slots=True)
class Workers:
    """What running workers said. `rtt_ms`: of a call to the draft, the best of several; None where
    no draft was asked. KV bytes are of one token; 0: not said."""

    verify: list[Cost] = field(default_factory=list)
    draft: list[Cost] = field(default_factory=list)
    target: target_pb2.TargetServiceGetInfoResponse | None = None
    drafter: draft_pb2.DrafterInfo | None = None
    most_k: int = _MOST_K
    rtt_ms: float | None = None
    target_kv_bytes: int = 0
    draft_kv_bytes: int = 0
    names: list[str] = field(default_factory=list)

    @property
    def row_bytes(self) -> int:
        """Of one row as these two would send it; 0: the draft reads none, or was not asked."""
        rows = row_format(self.target, self.drafter) if self.drafter is not None else None
        return rows.width * (4 if rows.dtype == _FLOAT32 else 2) if rows is not None else 0


def ask(addresses: Sequence[str], method: str) -> Workers:
    """GetInfo of every address; one that hosts both roles tells of both. Raises UNREACHABLE, and
    FIELD_INVALID where nobody is a worker or has the drafter."""
    found = Workers()
    for address in addresses:
        if not is_address(address):
            raise SpecwireError.field("--from", address, ADDRESSES)
        options = [*channel_options(link=True), ("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(address, options=options) as channel:
            roles = [
                _ask_target(found, channel, address),
                _ask_draft(found, channel, address, method),
            ]
        if not any(roles):
            accepted = "addresses of targets and drafts; `specwire info` shows them"
            raise SpecwireError.field("--from", address, accepted)
    return found


def _get_info(call: Callable[..., Any], request: Any, address: str) -> Any:
    """The answer; None where this server has no such service."""
    try:
        return call(request, timeout=_TIMEOUT_S)
    except grpc.RpcError as error:
        typed = from_rpc_error(error, address)
        if typed.reason is Reason.UNSUPPORTED:
            return None
        raise typed from error


def _ask_target(found: Workers, channel: grpc.Channel, address: str) -> bool:
    stub: Any = target_pb2_grpc.TargetServiceStub(channel)
    info = _get_info(stub.GetInfo, target_pb2.TargetServiceGetInfoRequest(), address)
    if info is None:
        return False
    found.target, found.verify = info, from_wire(info.costs, anchor=1)
    found.most_k = min(found.most_k, info.max_draft_tokens)
    found.target_kv_bytes = info.attention.kv_bytes_per_token
    found.names.append(f"target {info.model.name} on {info.worker.device}")
    return True


def _ask_draft(found: Workers, channel: grpc.Channel, address: str, method: str) -> bool:
    stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
    request = draft_pb2.DraftServiceGetInfoRequest()
    info = _get_info(stub.GetInfo, request, address)
    if info is None:
        return False
    fitting = [d for d in info.drafters if (d.method == method if method else d.is_default)]
    if not fitting:
        accepted = ", ".join(d.method for d in info.drafters)
        raise SpecwireError.field("--method", method, accepted, Reason.METHOD_UNKNOWN)
    drafter = fitting[0]
    found.draft = from_wire(drafter.costs, anchor=0)
    found.most_k = min(found.most_k, drafter.max_draft_tokens)
    found.draft_kv_bytes = drafter.attention.kv_bytes_per_token
    found.drafter = drafter
    found.names.append(f"draft {drafter.method} on {info.worker.device}")
    times = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        _get_info(stub.GetInfo, request, address)
        times.append(time.perf_counter() - began)
    found.rtt_ms = min(times) * 1e3
    return True


def times(flag: str, text: str, tokens: int) -> list[Cost]:
    """Reads `MS`, or `SESSIONS:MS,SESSIONS:MS`: what a step with `tokens` draft tokens takes."""
    found = []
    for part in text.split(",") if text else ():
        sessions, colon, ms = part.rpartition(":")
        try:
            cost = Cost(tokens, int(sessions) if colon else 1, 0, float(ms) / 1e3)
        except ValueError:
            cost = Cost(tokens, 0, 0, 0.0)
        if not (cost.sessions > 0 and 0 < cost.seconds < 1e6):
            raise SpecwireError.field(flag, text, "MS, or SESSIONS:MS,SESSIONS:MS, as 1:14,32:21.5")
        found.append(cost)
    return found


def acceptances(text: str) -> list[float]:
    """Reads chances by position, separated by commas."""
    try:
        chances = [float(part) for part in text.split(",")]
    except ValueError:
        chances = [-1.0]
    if not all(0.0 <= chance <= 1.0 for chance in chances):
        accepted = "chances from 0 to 1 by position, each given those before it, as 0.66,0.58,0.52"
        raise SpecwireError.field("--acceptance", text, accepted)
    return chances


def missing(flag: str, accepted: str) -> SpecwireError:
    """For an option that is needed beside what was given."""
    found = {"field": flag, "value": "", "accepted": accepted}
    return SpecwireError(Reason.FIELD_INVALID, f"{flag} is missing; accepted: {accepted}", found)


def check_given(
    k: int | None, given_tau: float | None, acceptance: str, by_hand: Mapping[str, str]
) -> None:
    """Each value by itself, before anything is missed beside it; `by_hand`: times by option."""
    if k is not None and not 1 <= k <= _MOST_K:
        raise SpecwireError.field("--k", k, f"1 to {_MOST_K}")
    if given_tau is not None and not 1.0 <= given_tau <= _MOST_K + 1:
        raise SpecwireError.field("--tau", given_tau, "1 to K + 1: tokens of a round")
    if acceptance:
        acceptances(acceptance)
    for flag, text in by_hand.items():
        times(flag, text, 0)


def taus_of(k: int | None, given_tau: float | None, acceptance: str, most: int) -> dict[int, float]:
    """Tokens a round by the K that may be chosen: the one given, or 1 to `most`."""
    if given_tau is None and not acceptance:
        accepted = "tokens of a round, beside --k K; or --acceptance, as 0.66,0.58,0.52, instead"
        raise missing("--tau", accepted)
    if given_tau is not None and acceptance:
        accepted = "no --tau beside --acceptance: one of the two"
        raise SpecwireError.field("--tau", given_tau, accepted)
    if k is not None and not 1 <= k <= most:
        raise SpecwireError.field("--k", k, f"1 to {most}")
    if given_tau is None:
        chances = acceptances(acceptance)
        return {n: tau(chances, n) for n in ([k] if k else range(1, most + 1))}
    if k is None:
        raise missing("--k", f"draft tokens of a round, 1 to {most}, beside --tau")
    if not 1.0 <= given_tau <= k + 1:
        raise SpecwireError.field("--tau", given_tau, f"1 to {k + 1}: tokens of a round, --k {k}")
    return {k: given_tau}


def work(
    workers: Workers,
    taus: dict[int, float],
    batch: int,
    context_tokens: int,
    row_bytes: int,
    *,
    plain_ms: str,
    verify_ms: str,
    draft_ms: str,
    colocated_draft_ms: str,
) -> Work:
    """Times given by hand replace those of the workers; they are of one K."""
    k = next(iter(taus))
    verify, draft = times("--verify-ms", verify_ms, k), times("--draft-ms", draft_ms, k)
    for flag, costs in (("--verify-ms", verify), ("--draft-ms", draft)):
        if costs and len(taus) > 1:
            raise missing("--k", f"draft tokens of a round, which {flag} is the time for")
    plain = times("--plain-ms", plain_ms, 0)
    if verify:
        verify += plain or [Cost(0, c.sessions, c.context, c.seconds) for c in verify]
    elif plain:
        verify = [c for c in workers.verify if c.tokens] + plain
    beside = times("--colocated-draft-ms", colocated_draft_ms, k)
    verify, draft = verify or workers.verify, draft or workers.draft
    for flag, costs in (("--verify-ms", verify), ("--draft-ms", draft)):
        if not costs:
            raise missing(flag, "a time in ms; or --from ADDRESS of workers, which tell theirs")
    alone = StepTimes(draft, context_tokens)
    return Work(
        verify=StepTimes(verify, context_tokens),
        draft=alone,
        colocated_draft=StepTimes(beside, context_tokens) if beside else alone,
        taus=taus,
        batch=batch,
        row_bytes=row_bytes,
    )


def row_bytes(workers: Workers, target: Footprint | None, draft: Footprint | None) -> int:
    """Of one row: what the checkpoints say, or the workers; 0: the draft reads none."""
    if target is not None and draft is not None:
        return draft.row_bytes(target)
    return workers.row_bytes
