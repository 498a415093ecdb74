"""What a service asks of the resolver: plain data, frozen, each service's own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from engine.attention.capabilities import Kind
from engine.attention.mode import LayerMode
from engine.attention.tables import EngineName


class KVGroup(StrEnum):
    """Where a draft's KV lives; only this decides what binds it to the target.

    same_cache: the kind and the KV of a target group, in its pages. pooled: own tensors and layout
    under the target's page table. private: own pages, as in a service of its own.
    """

    SAME_CACHE = "same_cache"
    POOLED = "pooled"
    PRIVATE = "private"


GraphMode = Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
GRAPH_MODES: tuple[GraphMode, ...] = (
    "NONE",
    "PIECEWISE",
    "FULL",
    "FULL_DECODE_ONLY",
    "FULL_AND_PIECEWISE",
)

# Spellings of one dtype. `fp8` stays: some backends store it in a layout of their own.
_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "e4m3": "fp8_e4m3",
    "e5m2": "fp8_e5m2",
    "": "auto",
}


def dtype_name(name: str) -> str:
    return _ALIASES.get(name.lower(), name.lower())


@dataclass(frozen=True, slots=True)
class Latent:
    """Dimensions of latent attention: what is cached is `rank + rope` elements a token.

    `softmax_factor` is on the usual scale (nope + rope)**-0.5.
    """

    rank: int
    rope: int
    nope: int
    index_topk: int = 0
    softmax_factor: float = 1.0

    @property
    def scale(self) -> float:
        return self.softmax_factor / math.sqrt(self.nope + self.rope)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of a model, without its weights. `head_size` is that of the keys as stored:
    `rank + rope` for latent attention. `modes` has one entry per layer.

    `override`: a backend that this model cannot do without; it is never carried to another model.
    """

    name: str
    kind: Kind
    heads: int
    kv_heads: int
    head_size: int
    modes: tuple[LayerMode, ...]
    dtype: str
    sinks: bool = False
    latent: Latent | None = None
    override: str = ""
    block_size: int = 0
    confidence_head: bool = False

    @property
    def stored(self) -> tuple[Kind, int, int]:
        """What decides the KV of a token, dtype and layout aside."""
        return self.kind, self.kv_heads, self.head_size


@dataclass(frozen=True, slots=True)
class Request:
    """`backend`: None is unset; `auto`, `inherit`, or a name. `kv_dtype`: `auto` is the model's.

    backend_per_kind  (`full_attention` | `sliding_window`, name); goes before `backend`
    query_tokens      rows of one request in a step: 1 + K for a verify block and for DFlash, K for
                      a next-token block, 1 for plain decoding
    dcp               decode context parallelism of the process that runs the model; `tp` its tensor
                      parallelism (None: as much as dcp needs)
    kv_sharded        whether dcp spreads this model's KV over the ranks; None: a target's and a
                      latent draft's is spread, a dense draft keeps its own on every rank
    uncapturable      why no CUDA graph can hold a step of the model, whatever its attention; or ""
    state_blocks      blocks of recurrent state, where a model has some; `max_requests` at once
    """

    shape: AttentionShape
    role: Literal["target", "draft"] = "target"
    method: str = ""
    backend: str | None = None
    backend_per_kind: tuple[tuple[str, str], ...] = ()
    kv_dtype: str = "auto"
    page_tokens: int | None = None
    kv_group: KVGroup = KVGroup.PRIVATE
    query_tokens: int = 1
    graph_mode: str = "auto"
    uncapturable: str = ""
    dcp: int = 1
    tp: int | None = None
    kv_sharded: bool | None = None
    adaptive_verification: bool = False
    state_blocks: int | None = None
    max_requests: int | None = None
    engine: EngineName = "vllm"

    @property
    def label(self) -> str:
        return f"{self.method} {self.role}".strip()

    @property
    def sharded(self) -> bool:
        """Whether dcp splits the KV of this model."""
        if self.dcp == 1:
            return False
        if self.kv_sharded is not None:
            return self.kv_sharded
        return self.role == "target" or self.shape.kind is not Kind.MHA
