"""The operators of many rows on a GPU where a row's bits may depend on its batch (`fast`)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.kernels.triton import plain
from engine.linear import DeviceLinear, Linear
from engine.models.layers import Kernels
from engine.models.triton_kernels import TritonKernels


def loose_kernels(kernels: TritonKernels) -> LooseKernels:
    fields = TritonKernels.__dataclass_fields__
    return LooseKernels(**{name: getattr(kernels, name) for name in fields})


def _of(linear: Linear) -> tuple[Tensor, Tensor | None]:
    assert isinstance(linear, DeviceLinear)
    return linear.weight, linear.bias


@dataclass(frozen=True)
class LooseKernels(TritonKernels):
    """Products by cuBLAS. There is never a delta, as in the class above."""

    def norm_linear(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, linear: Linear
    ) -> Tensor:
        assert delta is None
        return plain.norm_linear(residual, weight, eps, *_of(linear))

    # The products of torch are not fused with what follows: the two steps apart, as in the base.
    norm_qkv_store = Kernels.norm_qkv_store

    def norm_gated(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, gate_up: Linear
    ) -> Tensor:
        assert delta is None
        return plain.norm_gate_up(residual, weight, eps, *_of(gate_up))

    def linear_add(self, x: Tensor, linear: Linear, residual: Tensor) -> Tensor | None:
        plain.linear_add(x, *_of(linear), residual)
        return None

    def head(
        self,
        residual: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        eps: float,
        linear: Linear,
        rows: Tensor | None,
    ) -> Tensor:
        assert delta is None
        return plain.head(residual, rows, weight, eps, _of(linear)[0])
