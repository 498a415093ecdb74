"""The CUDA-graph mode of one service, from its own backends only.

A mode has two halves, for steps that only decode (or verify) and for mixed ones. A block drafter
(DFlash, DSpark) is captured whole or not at all: its query pass has no mixed steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.attention.capabilities import GraphLevel
from engine.attention.devices import DeviceProfile
from engine.attention.request import GRAPH_MODES, GraphMode, Request

BLOCK_DRAFTERS = ("dflash", "dspark")
_HALVES: dict[GraphMode, tuple[str, str]] = {
    "NONE": ("NONE", "NONE"),
    "PIECEWISE": ("PIECEWISE", "PIECEWISE"),
    "FULL": ("FULL", "FULL"),
    "FULL_DECODE_ONLY": ("FULL", "NONE"),
    "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE"),
}
_CAPTURE_LIMIT = 512


@dataclass(frozen=True, slots=True)
class Graphs:
    """`level` is the lowest of this service's backends. `reasons` say why `mode` is less than the
    best. `capture_tokens` are the batch sizes of the full graphs, in tokens."""

    requested: str
    mode: GraphMode
    level: GraphLevel
    reasons: tuple[str, ...] = ()
    capture_tokens: tuple[int, ...] = ()

    @property
    def decode(self) -> str:
        return _HALVES[self.mode][0]

    @property
    def mixed(self) -> str:
        return _HALVES[self.mode][1]


def needed_level(request: Request) -> GraphLevel:
    """Lowest level at which the steps of this service can be full graphs."""
    block = request.query_tokens > 1
    return GraphLevel.UNIFORM if block else GraphLevel.UNIFORM_SINGLE


def impossible(mode: str, request: Request, device: DeviceProfile, level: GraphLevel) -> str:
    """Why a mode cannot be had with a backend of that level; "" when it can."""
    if mode not in GRAPH_MODES:
        return f"unknown CUDA-graph mode {mode!r}; accepted: auto, {', '.join(GRAPH_MODES)}"
    if mode == "NONE":
        return ""
    if device.capability is None:
        return "no CUDA graphs on the cpu"
    if request.uncapturable:
        return request.uncapturable
    whole = request.role == "draft" and request.method in BLOCK_DRAFTERS
    if request.engine == "native" and mode != "FULL_DECODE_ONLY" and not (whole and mode == "FULL"):
        return "the native engine captures steps of one width only (FULL_DECODE_ONLY)"
    if mode == "PIECEWISE":
        return "the block of a draft is captured whole or not at all" if whole else ""
    needed = needed_level(request)
    if mode == "FULL" and not whole:
        needed = GraphLevel.ALWAYS
    if level < needed:
        tokens = request.query_tokens
        return f"graph level {level.name}, {needed.name} needed for {tokens} query tokens"
    if mode == "FULL_AND_PIECEWISE" and whole:
        return "the block of a draft is captured whole or not at all"
    return _too_many_requests(request)


def _too_many_requests(request: Request) -> str:
    blocks, wanted = request.state_blocks, request.max_requests
    if blocks is not None and wanted is not None and wanted > blocks:
        return f"{wanted} requests at once, {blocks} state blocks"
    return ""


def choose_graphs(request: Request, device: DeviceProfile, level: GraphLevel, cause: str) -> Graphs:
    """The mode that follows; an explicit one was checked before, by the candidates' reasons.

    `cause` names the backend with the lowest level.
    """
    wanted = request.graph_mode
    if wanted != "auto":
        mode = next(known for known in GRAPH_MODES if known == wanted)
        return Graphs(wanted, mode, level, (), _capture(request, mode))
    whole = request.role == "draft" and request.method in BLOCK_DRAFTERS
    ladder: tuple[GraphMode, ...] = ("FULL_AND_PIECEWISE", "PIECEWISE", "NONE")
    if whole or (request.engine == "native" and device.capability is not None):
        ladder = ("FULL_DECODE_ONLY", "NONE")
    reasons: list[str] = []
    for mode in ladder:
        why = impossible(mode, request, device, level)
        if not why:
            return Graphs(wanted, mode, level, tuple(reasons), _capture(request, mode))
        reason = f"{cause}: {why}" if "graph level" in why else why
        if reason not in reasons:
            reasons.append(reason)
    raise AssertionError("NONE is always possible")


def _capture(request: Request, mode: GraphMode) -> tuple[int, ...]:
    """Sizes of vLLM's usual list (1, 2, 4, 8, 16, 24, ...), each rounded up to whole blocks."""
    if _HALVES[mode][0] != "FULL":
        return ()
    block = request.query_tokens
    usual = (1, 2, 4, *range(8, _CAPTURE_LIMIT + 1, 8))
    return tuple(sorted({-(-size // block) * block for size in usual}))
