"""How an attention backend was chosen: plain data, so that it can travel to `GetInfo`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend that was considered; no reasons means it was valid."""

    name: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AttentionReport:
    """`requested` is what the settings said ("" when unset); `chosen` is what runs. `policy` is
    auto, inherit, name or model. `notes`: why graphs are less than the best, and known trouble."""

    requested: str
    policy: str
    chosen: str
    candidates: tuple[Candidate, ...]
    kv_dtype: str
    kv_bytes_per_token: int
    page_tokens: int
    graph_mode: str = "NONE"
    notes: tuple[str, ...] = ()
