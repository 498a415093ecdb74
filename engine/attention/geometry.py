"""KV geometry: computed once, never written to again, compared by both sides of a shared cache."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from engine.attention.capabilities import Kind, KvRule
from engine.attention.request import AttentionShape, dtype_name
from engine.errors import BackendUnavailable

_ITEM_BYTES = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "int8_per_token_head": 1.0,
    "fp8_per_token_head": 1.0,
    "int4_per_token_head": 0.5,
    # 4 bits, and one byte of scale for 16 elements.
    "nvfp4": 0.5625,
    "nvfp4_4over6": 0.5625,
}
# 512 fp8 + 4 fp32 scales + 64 bf16 of rope; and 448 fp8 + 64 bf16 + 8 of scales and padding.
_DS_MLA_BYTES, _DS_MLA_V4_BYTES = 512 + 16 + 128, 448 + 128 + 8
_DS_MLA_GROUP = 128  # fp8 values of a scale
_NVFP4_DS_MLA_BYTES = 352
_V4_ALIGNMENT, _V4_PLAIN_ALIGNMENT = 576, 512
_SCALE_BYTES = 4  # fp32, of K and of V, for each token and head


@dataclass(frozen=True, slots=True)
class Geometry:
    """Layout of the KV of one service. `token_bytes` is one layer's, 0 where a backend does not
    declare it; a page of one layer takes a multiple of `alignment_bytes`.
    """

    dtype: str
    token_bytes: int
    page_tokens: int
    alignment_bytes: int
    layers: int

    @property
    def bytes_per_token(self) -> int:
        """Of all layers, padding aside."""
        return self.token_bytes * self.layers

    @property
    def page_bytes(self) -> int:
        """One page of one layer, with its padding."""
        plain = self.token_bytes * self.page_tokens
        return -(-plain // self.alignment_bytes) * self.alignment_bytes

    def differences(self, other: Geometry) -> tuple[str, ...]:
        """What keeps two groups from being one cache, both values named: self's, then other's."""
        words = {
            "dtype": "kv dtype {} against {}",
            "token_bytes": "{} against {} bytes a token",
            "page_tokens": "{} against {} tokens a page",
            "alignment_bytes": "{} against {} bytes of page alignment",
        }
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return tuple(
            words[name].format(mine, theirs)
            for name, mine, theirs in pairs
            if name in words and mine != theirs
        )

    def check_allocated(self, pages: int, allocated_bytes: int) -> None:
        """Raises BackendUnavailable when memory and geometry disagree, naming both numbers."""
        expected = self.page_bytes * self.layers * pages
        if allocated_bytes != expected:
            per_token = allocated_bytes / (self.layers * pages * self.page_tokens)
            raise BackendUnavailable(
                f"KV geometry: {allocated_bytes} bytes allocated ({per_token:g} a token and layer),"
                f" {expected} expected ({self.token_bytes} a token and layer)"
            )


def stored_dtype(requested: str, rule: KvRule, model_dtype: str) -> str:
    """The concrete KV dtype: `auto` never travels further than here."""
    if rule.stored:
        return rule.stored
    if requested == "auto":
        return dtype_name(model_dtype)
    return "fp8_e4m3" if requested == "fp8" else requested


def token_bytes(shape: AttentionShape, dtype: str) -> int:
    """Bytes of one token in one layer; 0 where they are not declared."""
    if dtype == "fp8_ds_mla":
        return _ds_mla_bytes(shape)
    if dtype == "nvfp4_ds_mla":
        return _NVFP4_DS_MLA_BYTES
    if dtype not in _ITEM_BYTES:
        return 0
    if shape.kind is not Kind.MHA:
        return math.ceil(shape.head_size * _ITEM_BYTES[dtype])
    scale = _SCALE_BYTES if dtype.endswith("_per_token_head") else 0
    return 2 * shape.kv_heads * (math.ceil(shape.head_size * _ITEM_BYTES[dtype]) + scale)


def _ds_mla_bytes(shape: AttentionShape) -> int:
    if shape.kind is Kind.DSV4:
        return _DS_MLA_V4_BYTES
    if shape.latent is None:
        return _DS_MLA_BYTES
    rank, rope = shape.latent.rank, shape.latent.rope
    scales = _SCALE_BYTES * -(-rank // _DS_MLA_GROUP)
    return -(-rank // _SCALE_BYTES) * _SCALE_BYTES + scales + 2 * rope


def geometry_of(shape: AttentionShape, dtype: str, page_tokens: int, alignment: int) -> Geometry:
    """`alignment` 0 takes that of the layout."""
    if shape.kind is Kind.DSV4 and not alignment:
        alignment = _V4_ALIGNMENT if dtype == "fp8_ds_mla" else _V4_PLAIN_ALIGNMENT
    return Geometry(dtype, token_bytes(shape, dtype), page_tokens, alignment or 1, len(shape.modes))
