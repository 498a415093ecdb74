"""Shapes of the models that the kernels are measured on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shape:
    """A decoder of Llama's kind."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    head_norms: bool

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def products(self) -> dict[str, tuple[int, int]]:
        """Weights [n, k] of one layer; `gate_up` counts both halves."""
        return {
            "qkv": (self.qkv, self.hidden),
            "out": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }


SMOL = Shape("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, False)
LARGE = Shape("8b", 36, 4096, 12288, 32, 8, 128, 151936, True)
SHAPES = (SMOL, LARGE)
EPS = 1e-5


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    """Random numbers on the GPU."""
    return torch.empty(shape, dtype=dtype, device="cuda").normal_().mul_(scale)


def weight(n: int, k: int) -> torch.Tensor:
    """A weight that keeps the size of what it multiplies."""
    return normal(n, k, scale=k**-0.5)
