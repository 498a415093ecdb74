"""A linear layer whose weight is packed once for the way it will be run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from engine.kernels.cpu import ops

PANEL = 16  # columns of one packed panel in the C kernels

Mode = Literal["native", "torch"]


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


class PlainLinear(Linear):
    """`F.linear` on any device, in the weight's dtype."""

    rows_independent = False

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x.to(self._weight.dtype), self._weight).float()


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
