"""KV memory of a group of layers and the immutable geometry that both sides of a pairing
compare."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Layout of one KV group. `bytes_per_token` covers K and V of all layers."""

    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU the system hands out the memory page by page, as it is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks for zeroed memory (calloc), torch would write all of it now.
    return (
        torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
        .view(dtype)
        .view(shape)
    )


class KVCache:
    """Tensors of one KV group: `data` [layers, 2, pages, page_tokens, kv_heads, head_dim] and its
    parts `k[layer]` and `v[layer]`.
    """

    def __init__(
        self, geometry: KVGeometry, page_count: int, device: torch.device | str = "cpu"
    ) -> None:
        self.geometry, self.page_count = geometry, page_count
        shape = (
            geometry.layers,
            2,
            page_count,
            geometry.page_tokens,
            geometry.kv_heads,
            geometry.head_dim,
        )
        self.data = zeros(shape, geometry.dtype, torch.device(device))
        allocated = self.data.numel() * self.data.element_size()
        expected = geometry.bytes_per_token * geometry.page_tokens * page_count
        assert allocated == expected, f"allocated {allocated} bytes, geometry says {expected}"
        self.k = [self.data[layer, 0] for layer in range(geometry.layers)]
        self.v = [self.data[layer, 1] for layer in range(geometry.layers)]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores k, v [rows, kv_heads, head_dim] at flat slots [rows] (int64)."""
        self.k[layer].view(-1, *k.shape[1:]).index_copy_(0, slots, k.to(self.geometry.dtype))
        self.v[layer].view(-1, *v.shape[1:]).index_copy_(0, slots, v.to(self.geometry.dtype))

    def copy_page(self, source: int, to: int) -> None:
        """Copies one page of every layer."""
        self.data[:, :, to] = self.data[:, :, source]
