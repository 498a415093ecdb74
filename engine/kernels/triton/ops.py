"""Every fused operator. Importing this raises TritonUnavailable where they cannot run."""

from __future__ import annotations

from engine.kernels.triton import require

require()

from engine.draw_rows import DrawRows  # noqa: E402
from engine.kernels.triton.accept import accept  # noqa: E402
from engine.kernels.triton.dependent import use_dependent_launch  # noqa: E402
from engine.kernels.triton.draw import draw  # noqa: E402
from engine.kernels.triton.gemm import (  # noqa: E402
    head,
    linear,
    linear_add,
    norm_gate_up,
    norm_linear,
)
from engine.kernels.triton.norm import embed, rms_norm  # noqa: E402
from engine.kernels.triton.qkv import norm_qkv_store  # noqa: E402
from engine.kernels.triton.store import context_store, qkv_store  # noqa: E402
from engine.kernels.triton.walk import walk  # noqa: E402

__all__ = [
    "DrawRows",
    "accept",
    "context_store",
    "draw",
    "embed",
    "head",
    "linear",
    "linear_add",
    "norm_gate_up",
    "norm_linear",
    "norm_qkv_store",
    "qkv_store",
    "rms_norm",
    "use_dependent_launch",
    "walk",
]
