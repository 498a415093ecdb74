"""The operators of a forward on a GPU: Triton's, fused (`engine/kernels/triton`).

Activations have the weights' dtype, the residual stream and every sum are fp32. A product adds to
the residual stream itself, so there is never a delta.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from engine.draw_rows import DrawRows
from engine.kernels.cpu.reference import rope_kv_write_ref, silu_mul_ref
from engine.kernels.triton import gemm, norm, store, wide
from engine.kernels.triton.draw import draw
from engine.kernels.triton.qkv import norm_qkv_store
from engine.kernels.triton.tiles import Wide
from engine.linear import DeviceLinear, Linear
from engine.models.layers import HeadNorms, Kernels, QkvShape, RopeTables, Rows


def triton_kernels(dtype: torch.dtype) -> TritonKernels:
    """The operators for activations of that dtype. On a GPU it is tried which tiles of many rows
    give the bits of those of few."""

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x, weight, eps, dtype)

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return norm.rms_norm(residual, weight, eps, dtype)

    return TritonKernels(
        "triton",
        rms_norm,
        add_rms_norm,
        silu_mul_ref,
        rope_kv_write_ref,
        _gumbel_argmax,
        draw,
        wide.equal_tiles(dtype),
    )


def _gumbel_argmax(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, choices: Tensor, indices: Tensor
) -> Tensor:
    asked = (tensor.to(logits.device) for tensor in (temperatures, seeds, choices, indices))
    return draw(logits, DrawRows(*asked))


def _device(linear: Linear) -> DeviceLinear:
    assert isinstance(linear, DeviceLinear)
    return linear


@dataclass(frozen=True)
class TritonKernels(Kernels):
    """`wide`: tiles that a product of many rows may be given. From `loose_rows` on cuBLAS is worth
    its own launches of norm, rotation and product."""

    wide: Wide = ()
    loose_rows: int = 65

    def loose(self, rows: int) -> Kernels | None:
        return self._loose if rows >= self.loose_rows else None

    @cached_property
    def _loose(self) -> Kernels:
        from engine.models.loose_kernels import loose_kernels  # made of these

        return loose_kernels(self)

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        return norm.embed(ids, table)

    def norm_linear(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, linear: Linear
    ) -> Tensor:
        _add(residual, delta)
        product = _device(linear)
        return gemm.norm_linear(residual, weight, eps, product.weight, product.bias, wide=self.wide)

    def norm_qkv_store(
        self,
        residual: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        eps: float,
        linear: Linear,
        shape: QkvShape,
        norms: HeadNorms | None,
        rope: RopeTables,
        rows: Rows,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        _add(residual, delta)
        product = _device(linear)
        return norm_qkv_store(
            residual, weight, eps, product.weight, product.bias, norms, rope.cos, rope.sin,
            rows.positions, *cache, rows.slots, self.wide,
        )  # fmt: skip

    def norm_gated(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, gate_up: Linear
    ) -> Tensor:
        _add(residual, delta)
        product = _device(gate_up)
        return gemm.norm_gate_up(
            residual, weight, eps, product.weight, product.bias, wide=self.wide
        )

    def linear_add(self, x: Tensor, linear: Linear, residual: Tensor) -> Tensor | None:
        product = _device(linear)
        gemm.linear_add(x, product.weight, product.bias, residual, wide=self.wide)
        return None

    def lookup_add(self, table: Tensor, ids: Tensor, linear: Linear, into: Tensor) -> None:
        product = _device(linear)
        gemm.linear_add(table, product.weight, product.bias, into, ids)

    def head(
        self,
        residual: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        eps: float,
        linear: Linear,
        rows: Tensor | None,
    ) -> Tensor:
        _add(residual, delta)
        return gemm.head(residual, rows, weight, eps, _device(linear).weight, self.wide)

    def store(
        self,
        qkv: Tensor,
        shape: QkvShape,
        norms: HeadNorms | None,
        eps: float,
        rope: RopeTables,
        rows: Rows,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        tables = rope.cos, rope.sin
        return store.qkv_store(qkv, norms, eps, *tables, rows.positions, *cache, rows.slots)

    def store_context(
        self,
        kv: Tensor,
        kv_shape: tuple[int, int],
        norms: Tensor,
        eps: float,
        rope: RopeTables,
        positions: Tensor,
        slots: Tensor,
        cache: Tensor,
    ) -> None:
        store.context_store(kv, norms, eps, rope.cos, rope.sin, positions, cache, slots)


def _add(residual: Tensor, delta: Tensor | None) -> None:
    if delta is not None:
        residual += delta
