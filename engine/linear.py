"""A linear layer whose weight is packed once for the way it will be run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from engine.kernels.cpu import ops

PANEL = 16  # columns of one packed panel in the C kernels

Mode = Literal["native", "torch", "triton"]


class Linear(ABC):
    """x fp32 [rows, in_features] -> fp32 [rows, out_features]."""

    in_features: int
    out_features: int
    rows_independent: bool

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...


class NativeLinear(Linear):
    """The C kernel: fp32 activations and sums. A row's bits do not depend on the other rows."""

    rows_independent = True

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        library = ops.library()
        bf16 = weight.dtype == torch.bfloat16
        self._kernel = library.sw_gemm_bf16 if bf16 else library.sw_gemm_f32
        self._packed = _panels(weight) if bf16 else _panels(weight.float())
        self._pointer = self._packed.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != self.in_features:
            got, wanted = f"{x.dtype} {tuple(x.shape)}", f"fp32 [rows, {self.in_features}]"
            raise ValueError(f"x is {got}; accepted: {wanted}")
        x = x.contiguous()
        rows, n = x.shape[0], self.out_features
        y = torch.empty((rows, n))
        threads = torch.get_num_threads()
        self._kernel(x.data_ptr(), self._pointer, y.data_ptr(), rows, n, self.in_features, threads)
        return y


def _panels(weight: Tensor) -> Tensor:
    """The layout gemm.c reads; columns are padded with zeros to whole panels."""
    columns, depth = weight.shape
    short = -columns % PANEL
    if short:
        weight = torch.cat((weight, weight.new_zeros(short, depth)))
    if weight.dtype == torch.bfloat16:
        # [panel, half, 8, k] -> [panel, k, 8, half]: a word holds columns c and c + 8.
        return weight.view(-1, 2, 8, depth).permute(0, 3, 2, 1).contiguous()
    return weight.view(-1, PANEL, depth).transpose(1, 2).contiguous()


class PackedLinear(Linear):
    """oneDNN with a weight reordered once. Kernels vary with the number of rows, so bits may."""

    rows_independent = False

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = weight.shape
        self._dtype = dtype
        # The layout suits 8 rows: a verify block.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous(), 8)

    def __call__(self, x: Tensor) -> Tensor:
        run = torch.ops.mkldnn._linear_pointwise
        y: Tensor = run(x.to(self._dtype), self._packed, None, "none", [], "")
        return y.float()


class Int8Linear(Linear):
    """int8 weights with a scale a column, activations quantised a row at a time: about 1 % off.
    For what is a hint anyway. oneDNN; fast where the CPU has int8 dot products. Others add pairs of
    products up in 16 bits, which saturate, so half the levels are left to activations there.
    """

    rows_independent = False

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self.levels = 127 if int8_is_fast() else 63  # of activations, either side of 0
        scales = (weight.abs().amax(1).float() / 127).clamp_(min=1e-20)
        whole = torch.empty(weight.shape, dtype=torch.int8)
        for first in range(0, self.out_features, 8192):  # a vocabulary in fp32 is large
            part = slice(first, first + 8192)
            whole[part] = (weight[part].float() / scales[part, None]).round_()
        self._packed = torch.ops.onednn.qlinear_prepack(whole, [8, self.in_features])
        self._scales = scales
        self._zeros = torch.zeros(self.out_features, dtype=torch.int32)

    def __call__(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(1, keepdim=True).clamp_(min=1e-20)
        zero = self.levels + 1  # activations are unsigned: this stands for 0
        whole = (x * (self.levels / largest)).round_().add_(zero).to(torch.uint8)
        scale, weight = 1 / self.levels, (self._packed, self._scales, self._zeros)
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            whole, scale, zero, *weight, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return y.mul_(largest)


def int8_is_fast() -> bool:
    """Whether this CPU has int8 dot products, and torch was built to use them."""
    return torch._C._has_mkldnn and torch.cpu._is_vnni_supported()


class PlainLinear(Linear):
    """`F.linear` on any device, in the weight's dtype."""

    rows_independent = False

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x.to(self._weight.dtype), self._weight).float()


class DeviceLinear(Linear):
    """A weight for the Triton kernels, which may fuse more than the product."""

    rows_independent = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight.contiguous()
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        from engine.kernels.triton.gemm import linear  # Triton is not everywhere

        return linear(x, self.weight, self.bias, torch.float32)


class BiasedLinear(Linear):
    """A product with a bias [out_features] added in fp32; a row stays as independent as it was."""

    def __init__(self, product: Linear, bias: Tensor) -> None:
        self.in_features, self.out_features = product.in_features, product.out_features
        self.rows_independent = product.rows_independent
        self._product, self._bias = product, bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x).add_(self._bias)


def pack_linear(weight: Tensor, mode: Mode, bias: Tensor | None = None) -> Linear:
    """Packs weight [out_features, in_features], bf16 or fp32. `native` needs `ops.available()`."""
    if mode == "triton":
        return DeviceLinear(weight, bias)
    product = _pack(weight, mode)
    return product if bias is None else BiasedLinear(product, bias)


def _pack(weight: Tensor, mode: Mode) -> Linear:
    known = weight.dtype in (torch.bfloat16, torch.float32)
    if weight.dim() != 2 or not weight.numel() or not known:
        got = f"{weight.dtype} {tuple(weight.shape)}"
        raise ValueError(f"weight is {got}; accepted: bf16 or fp32, 2 dimensions, not empty")
    if mode == "native":
        return NativeLinear(weight)
    if not weight.is_cpu or not torch._C._has_mkldnn:
        return PlainLinear(weight)
    bf16_units = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    keep = weight.dtype == torch.bfloat16 and bf16_units
    return PackedLinear(weight, torch.bfloat16 if keep else torch.float32)
