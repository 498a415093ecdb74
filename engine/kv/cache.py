"""KV memory of a group of layers and the immutable geometry that both sides of a pairing
compare."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


class CacheGeometry(Protocol):
    """Layout of one KV group: what pages and backends need to know of any kind."""

    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def value_width(self) -> int:
        """Values of one KV head."""

    @property
    def page_tokens(self) -> int: ...
    @property
    def bytes_per_token(self) -> int:
        """Of all layers."""


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Layout of one KV group. `bytes_per_token` covers K and V of all layers."""

    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: torch.dtype

    @property
    def value_width(self) -> int:
        return self.head_dim

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


class PagedCache(ABC):
    """The memory of one KV group, `data`, checked against its geometry."""

    geometry: CacheGeometry

    def __init__(
        self,
        geometry: CacheGeometry,
        page_count: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.geometry, self.page_count = geometry, page_count
        self.data = zeros(shape, dtype, torch.device(device))
        expected = geometry.bytes_per_token * geometry.page_tokens * page_count
        allocated = self.allocated_bytes
        assert allocated == expected, f"allocated {allocated} bytes, geometry says {expected}"

    @property
    def allocated_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    @property
    def device(self) -> torch.device:
        return self.data.device

    @abstractmethod
    def gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [tokens, kv_heads, key width] and values [tokens, kv_heads, value width] of whole
        pages (int64 [n]), in their order."""

    @abstractmethod
    def copy_page(self, source: int, to: int) -> None:
        """Copies one page of every layer."""


class KVCache(PagedCache):
    """Tensors of one KV group: `data` [layers, 2, pages, page_tokens, kv_heads, head_dim] and its
    parts `k[layer]` and `v[layer]`.
    """

    geometry: KVGeometry

    def __init__(
        self, geometry: KVGeometry, page_count: int, device: torch.device | str = "cpu"
    ) -> None:
        token = (geometry.page_tokens, geometry.kv_heads, geometry.head_dim)
        shape = (geometry.layers, 2, page_count, *token)
        super().__init__(geometry, page_count, shape, geometry.dtype, device)
        self.k = [self.data[layer, 0] for layer in range(geometry.layers)]
        self.v = [self.data[layer, 1] for layer in range(geometry.layers)]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Stores k, v [rows, kv_heads, head_dim] at flat slots [rows] (int64)."""
        self.k[layer].view(-1, *k.shape[1:]).index_copy_(0, slots, k.to(self.geometry.dtype))
        self.v[layer].view(-1, *v.shape[1:]).index_copy_(0, slots, v.to(self.geometry.dtype))

    def gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k[layer][pages].flatten(0, 1), self.v[layer][pages].flatten(0, 1)

    def copy_page(self, source: int, to: int) -> None:
        self.data[:, :, to] = self.data[:, :, source]
