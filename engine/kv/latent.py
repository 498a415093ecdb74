"""KV memory of latent attention: one vector a token and layer, plain or in DeepSeek's fp8 layout.

The fp8 layout keeps the latent values as fp8 (e4m3) with an fp32 scale for each 128 of them, and
the key that turns in bf16: 512 + 4 * 4 + 2 * 64 = 656 bytes for DeepSeek-V3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kv.cache import PagedCache

FP8_DS_MLA = "fp8_ds_mla"
_PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_GROUP = 128  # latent values that share a scale
_SCALE_BYTES, _ROPE_BYTES = 4, 2
_FP8_MAX = 448.0


def fp8_ds_mla_bytes(rank: int, rope: int) -> int:
    """Bytes of one token in one layer of the fp8 layout. Scales stand at a multiple of 4 bytes."""
    return _scales_at(rank) + _SCALE_BYTES * _groups(rank) + _ROPE_BYTES * rope


def _groups(rank: int) -> int:
    return -(-rank // _GROUP)


def _scales_at(rank: int) -> int:
    return -(-rank // _SCALE_BYTES) * _SCALE_BYTES


@dataclass(frozen=True, slots=True)
class LatentGeometry:
    """Layout of one group of latent layers; `rope` is even. `layout`: float32, bfloat16, float16,
    or fp8_ds_mla."""

    layers: int
    rank: int
    rope: int
    page_tokens: int
    layout: str

    @property
    def kv_heads(self) -> int:
        """All query heads read the same vector."""
        return 1

    @property
    def value_width(self) -> int:
        return self.rank

    @property
    def width(self) -> int:
        """Values of a token in one layer."""
        return self.rank + self.rope

    @property
    def token_bytes(self) -> int:
        """Of one layer."""
        if self.layout == FP8_DS_MLA:
            return fp8_ds_mla_bytes(self.rank, self.rope)
        return self.width * _PLAIN[self.layout].itemsize

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.token_bytes


@dataclass(frozen=True, slots=True)
class Parts:
    """Views of packed tokens [..., token_bytes]: e4m3 [..., rank], fp32 [..., groups] and bf16
    [..., rope]."""

    values: Tensor
    scales: Tensor
    rope: Tensor


def split_fp8(packed: Tensor, rank: int, rope: int) -> Parts:
    """Views into uint8 [..., token_bytes], whose last dimension is contiguous."""
    at, after = _scales_at(rank), _scales_at(rank) + _SCALE_BYTES * _groups(rank)
    return Parts(
        packed[..., :rank].view(torch.float8_e4m3fn),
        packed[..., at:after].view(torch.float32),
        packed[..., after : after + _ROPE_BYTES * rope].view(torch.bfloat16),
    )


def pack_fp8(latent: Tensor, rank: int, rope: int) -> Tensor:
    """Float [rows, rank + rope] -> uint8 [rows, token_bytes]. A scale is the power of two at or
    above the group's largest magnitude over 448, so that bf16 holds what is read without loss."""
    rows, groups = latent.shape[0], _groups(rank)
    packed = latent.new_zeros((rows, fp8_ds_mla_bytes(rank, rope)), dtype=torch.uint8)
    parts = split_fp8(packed, rank, rope)
    values = latent.new_zeros((rows, groups * _GROUP), dtype=torch.float32)
    values[:, :rank] = latent[:, :rank]
    grouped = values.view(rows, groups, _GROUP)
    scales = (grouped.abs().amax(-1).clamp_min(1e-12) / _FP8_MAX).log2().ceil().exp2()
    scaled = (grouped / scales[..., None]).clamp(-_FP8_MAX, _FP8_MAX).flatten(1)[:, :rank]
    parts.values.copy_(scaled.to(torch.float8_e4m3fn))
    parts.scales.copy_(scales)
    parts.rope.copy_(latent[:, rank:])
    return packed


def unpack_fp8(packed: Tensor, rank: int, rope: int) -> Tensor:
    """uint8 [..., token_bytes] -> fp32 [..., rank + rope]."""
    parts = split_fp8(packed, rank, rope)
    scales = parts.scales.repeat_interleave(_GROUP, dim=-1)[..., :rank]
    return torch.cat((parts.values.float() * scales, parts.rope.float()), dim=-1)


class LatentCache(PagedCache):
    """`latent[layer]` is [pages, page_tokens, width] of the layout's dtype, or uint8 [pages,
    page_tokens, token_bytes] in the fp8 layout."""

    geometry: LatentGeometry

    def __init__(
        self, geometry: LatentGeometry, page_count: int, device: torch.device | str = "cpu"
    ) -> None:
        self.quantised = geometry.layout == FP8_DS_MLA
        dtype = torch.uint8 if self.quantised else _PLAIN[geometry.layout]
        last = geometry.token_bytes // dtype.itemsize
        shape = (geometry.layers, page_count, geometry.page_tokens, last)
        super().__init__(geometry, page_count, shape, dtype, device)
        self.latent = [self.data[layer] for layer in range(geometry.layers)]

    def write(self, layer: int, latent: Tensor, slots: Tensor) -> None:
        """Stores float [rows, width] at flat slots [rows] (integers)."""
        store = self.latent[layer].view(-1, self.latent[layer].shape[-1])
        if self.quantised:
            latent = pack_fp8(latent, self.geometry.rank, self.geometry.rope)
        store.index_copy_(0, slots.long(), latent.to(store.dtype))

    def parts(self, layers: int | slice) -> tuple[Tensor, Tensor, Tensor]:
        """Latent values, scales and keys that turn, as views [pages, page_tokens, ...] of a layer
        or [layers, pages, page_tokens, ...]; a plain layout has no scales, and the whole cache
        stands for them."""
        rank, data = self.geometry.rank, self.data[layers]
        if self.quantised:
            found = split_fp8(data, rank, self.geometry.rope)
            return found.values, found.scales, found.rope
        return data[..., :rank], data, data[..., rank:]

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [tokens, 1, width]; values [tokens, 1, rank] are their beginning. fp32 if packed."""
        found = self.latent[layer][pages].flatten(0, 1)
        if self.quantised:
            found = unpack_fp8(found, self.geometry.rank, self.geometry.rope)
        keys = found[:, None]
        return keys, keys[..., : self.geometry.rank]

    def copy_page(self, source: int, to: int) -> None:
        self.data[:, to] = self.data[:, source]
