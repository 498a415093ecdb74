"""Models and requests that the tests of backend resolution share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.attention.capabilities import Kind
from engine.attention.devices import PROFILES, DeviceProfile
from engine.attention.mode import LayerMode
from engine.attention.outcome import kv_group
from engine.attention.request import AttentionShape, Latent, Request
from engine.attention.resolution import Resolution
from engine.attention.resolve import resolve

CAUSAL, OPEN = LayerMode(), LayerMode(causal=False)
WINDOWED = LayerMode(window=2048)
LATENT = Latent(rank=512, rope=64, nope=128)

DENSE = AttentionShape("qwen3", Kind.MHA, 32, 8, 128, (CAUSAL,) * 3, "bfloat16")
MLA = AttentionShape("deepseek_v3", Kind.MLA, 128, 1, 576, (CAUSAL,) * 3, "bfloat16", latent=LATENT)
V4 = AttentionShape("deepseek_v4", Kind.DSV4, 64, 1, 512, (CAUSAL,) * 3, "bfloat16", sinks=True)


def device(name: str) -> DeviceProfile:
    return PROFILES[name]


def target(shape: AttentionShape = DENSE, **changes: Any) -> Request:
    return replace(Request(shape, query_tokens=8), **changes)


def dflash(*modes: LayerMode, shape: AttentionShape = DENSE, **changes: Any) -> Request:
    """A DFlash draft of 7 tokens a block; non-causal unless modes are given."""
    shape = replace(shape, modes=modes or (OPEN,) * 3)
    return replace(Request(shape, "draft", "dflash", query_tokens=8), **changes)


def dspark_v4(**changes: Any) -> Request:
    """DeepSeek-V4's own DSpark draft: layers with a window, rows that look ahead."""
    shape = replace(V4, modes=(LayerMode(False, 128),) * 3)
    return replace(Request(shape, "draft", "dspark", query_tokens=7), **changes)


def beside(draft: Request, other: Request, where: DeviceProfile) -> tuple[Resolution, Resolution]:
    """Target and draft of one process, each resolved for itself; raises what either raises."""
    resolved = resolve(other, where)
    own = replace(draft, kv_group=kv_group(draft, other, colocated=True))
    return resolved, resolve(own, where, resolved)
