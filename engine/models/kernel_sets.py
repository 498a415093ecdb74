"""The kernels of a mode that `device.kernel_mode` chose."""

from __future__ import annotations

import torch

from engine.linear import Mode
from engine.models.layers import NATIVE, TORCH, Kernels


def kernels_for(mode: Mode, dtype: torch.dtype) -> Kernels:
    """`dtype` is that of the weights, and so of Triton's activations."""
    if mode == "triton":
        from engine.models.triton_kernels import triton_kernels  # Triton is not everywhere

        return triton_kernels(dtype)
    return NATIVE if mode == "native" else TORCH
