"""Resolutions and refusals side by side, and both as JSON: what `specwire backends` works with."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from engine.attention.capabilities import Kind
from engine.attention.devices import DeviceProfile
from engine.attention.refusal import AttentionRefused, Refusal
from engine.attention.request import KVGroup, Request
from engine.attention.resolution import Resolution
from engine.attention.resolve import resolve


@dataclass(frozen=True, slots=True)
class Outcome:
    """Either a resolution or a refusal of one request."""

    request: Request
    device: str
    resolution: Resolution | None
    refusal: Refusal | None

    @property
    def resolved(self) -> bool:
        return self.resolution is not None

    @property
    def chosen(self) -> str:
        return self.resolution.chosen if self.resolution else ""


def judge(request: Request, device: DeviceProfile, target: Resolution | None = None) -> Outcome:
    try:
        return Outcome(request, device.name, resolve(request, device, target), None)
    except AttentionRefused as error:
        return Outcome(request, device.name, None, error.refusal)


def kv_group(draft: Request, target: Request, colocated: bool) -> KVGroup:
    """Where a draft's KV lives: in the target's cache only if it has the target's attention, that
    is kind, KV of a token and causality. DeepSeek-V4 knows causality as index lists only.
    """
    if not colocated:
        return KVGroup.PRIVATE
    like = draft.shape.stored == target.shape.stored
    causal = {mode.causal for mode in target.shape.modes}
    runs = draft.shape.kind is Kind.DSV4 or all(mode.causal in causal for mode in draft.shape.modes)
    return KVGroup.SAME_CACHE if like and runs else KVGroup.POOLED


def as_json(outcome: Outcome) -> dict[str, Any]:
    request, resolution, refusal = outcome.request, outcome.resolution, outcome.refusal
    found: dict[str, Any] = {
        "resolved": outcome.resolved,
        "role": request.role,
        "method": request.method,
        "model_type": request.shape.name,
        "device": outcome.device,
        "engine": request.engine,
        "requested": request.backend or "",
        "attention": request.shape.kind.value,
        "kv_group": request.kv_group.value,
        "dcp": request.dcp,
        "kv_sharded": request.sharded,
        "query_tokens": request.query_tokens,
    }
    if resolution is not None:
        found |= _resolved(resolution)
    if refusal is not None:
        found |= {
            "chosen": "",
            "error": str(refusal),
            "problem": refusal.problem,
            "described": refusal.described,
            "inherited": refusal.inherited,
            "candidates": [asdict(candidate) for candidate in refusal.candidates],
        }
    return found


def _resolved(resolution: Resolution) -> dict[str, Any]:
    graphs = resolution.graphs
    return {
        "chosen": resolution.chosen,
        "policy": resolution.policy,
        "inherited": resolution.inherited,
        "candidates": [asdict(candidate) for candidate in resolution.candidates],
        "layers": [
            {
                "layers": list(group.layers),
                "causal": group.mode.causal,
                "window": group.mode.window,
                "backend": group.chosen,
                "graph_level": group.level.name,
            }
            for group in resolution.groups
        ],
        "kv": asdict(resolution.geometry)
        | {"bytes_per_token": resolution.geometry.bytes_per_token},
        "graphs": {
            "requested": graphs.requested,
            "mode": graphs.mode,
            "decode": graphs.decode,
            "mixed": graphs.mixed,
            "level": graphs.level.name,
            "reasons": list(graphs.reasons),
            "capture_tokens": list(graphs.capture_tokens),
        },
        "warnings": list(resolution.warnings),
    }
