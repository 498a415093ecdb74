"""Fused operators of the GPU's hot path, in Triton: `ops` has them all, `reference` in plain torch.

Importing this package needs neither Triton nor a GPU; importing `ops` raises TritonUnavailable
without them. Every operator may be captured in a CUDA graph, and a row's bits depend neither on how
many rows there are nor on the other rows.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from engine.errors import EngineError

__all__ = ["TritonUnavailable", "available", "require", "unavailable_reason", "version"]

_OLDEST_CAPABILITY = (8, 0)  # bf16 tensor cores


class TritonUnavailable(EngineError):
    """The Triton kernels cannot run here; the text says why."""


@functools.cache
def unavailable_reason() -> str:
    """Why `available()` is False; empty when it is True."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if (found := torch.cuda.get_device_capability()) < _OLDEST_CAPABILITY:
        return f"the GPU has compute capability {found[0]}.{found[1]}; accepted: 8.0 or newer"
    return ""


def available() -> bool:
    """True with Triton and a GPU that it can use, or with Triton's interpreter."""
    return not unavailable_reason()


def require() -> None:
    """Raises TritonUnavailable unless `available()`."""
    if reason := unavailable_reason():
        raise TritonUnavailable(f"Triton kernels are not available: {reason}")


def version() -> str:
    """Triton's; `none` without it."""
    if importlib.util.find_spec("triton") is None:
        return "none"
    import triton

    return str(triton.__version__)
