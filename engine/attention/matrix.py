"""Every kind of target beside every kind of draft on one device, from typical shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.attention.asked import pair
from engine.attention.capabilities import Kind
from engine.attention.devices import DeviceProfile
from engine.attention.mode import LayerMode
from engine.attention.outcome import Outcome, as_json
from engine.attention.request import AttentionShape, Latent, Request
from engine.attention.tables import EngineName

_K = 7
_CAUSAL, _OPEN, _WINDOW = LayerMode(), LayerMode(False), LayerMode(True, 2048)
_LATENT, _SPARSE = Latent(512, 64, 128), Latent(512, 64, 128, index_topk=2048)


def _dense(name: str, *modes: LayerMode) -> AttentionShape:
    return AttentionShape(name, Kind.MHA, 32, 8, 128, modes, "bfloat16")


def _latent(name: str, kind: Kind, latent: Latent, mode: LayerMode) -> AttentionShape:
    return AttentionShape(name, kind, 128, 1, 576, (mode,), "bfloat16", latent=latent)


def _v4(name: str, mode: LayerMode) -> AttentionShape:
    return AttentionShape(name, Kind.DSV4, 64, 1, 512, (mode,), "bfloat16", sinks=True)


# Typical shapes: a GQA model of 8B, DeepSeek-V3, DeepSeek-V3.2, DeepSeek-V4; and drafts for them.
TARGETS = {
    "dense (GQA)": _dense("dense", _CAUSAL),
    "MLA": _latent("mla", Kind.MLA, _LATENT, _CAUSAL),
    "sparse MLA": _latent(
        "sparse_mla", Kind.SPARSE_MLA, replace(_LATENT, index_topk=2048), _CAUSAL
    ),
    "DeepSeek-V4": _v4("deepseek_v4", _CAUSAL),
}
DRAFTS = {
    "DFlash, non-causal": ("dflash", _dense("dense", _OPEN)),
    "DFlash, causal": ("dflash", _dense("dense", _CAUSAL)),
    "DFlash, mixed windows": ("dflash", _dense("dense", _WINDOW, _WINDOW, _OPEN)),
    "DSpark, MLA": ("dspark", _latent("mla", Kind.MLA, _LATENT, _OPEN)),
    "DSpark, DeepSeek-V4": ("dspark", _v4("deepseek_v4", LayerMode(False, 128))),
    "draft model": ("draft_model", _dense("dense", _CAUSAL)),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A pairing on the device, as separate services and in one process."""

    target: str
    draft: str
    beside: Outcome
    separate: Outcome
    colocated: Outcome

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "draft": self.draft,
            "target_outcome": as_json(self.beside),
            "separate": as_json(self.separate),
            "colocated": as_json(self.colocated),
        }


def matrix(device: DeviceProfile, dcp: int = 1, kv_dtype: str = "auto") -> list[Cell]:
    """All pairings. `dcp` is that of the target's process, so of a co-located draft too; a draft
    service of its own has none."""
    engine: EngineName = "native" if device.capability is None else "vllm"
    cells = []
    for target_name, target_shape in TARGETS.items():
        target = _request(target_shape, "", engine, dcp, kv_dtype)
        for draft_name, (method, shape) in DRAFTS.items():
            draft = _request(shape, method, engine, dcp, "auto")
            apart = pair(replace(draft, dcp=1), target, device, False)
            together = pair(draft, target, device, True)
            assert apart.target is not None
            cells.append(
                Cell(target_name, draft_name, apart.target, apart.outcome, together.outcome)
            )
    return cells


def _request(
    shape: AttentionShape, method: str, engine: EngineName, dcp: int, kv_dtype: str
) -> Request:
    rows = {"dspark": _K, "draft_model": 1}.get(method, _K + 1)
    if engine == "native":
        shape = replace(shape, dtype="float32")
    return Request(
        shape=shape,
        role="draft" if method else "target",
        method=method,
        kv_dtype=kv_dtype,
        query_tokens=rows,
        dcp=dcp,
        engine=engine,
    )
