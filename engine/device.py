"""Where a model runs and what its numbers depend on."""

from __future__ import annotations

import hashlib
import platform

import torch

from engine.config import EngineConfig
from engine.errors import BackendUnavailable, SettingRefused
from engine.kernels.cpu import ops

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def resolve_device(requested: str) -> torch.device:
    """The native engine runs on the CPU; anything else is refused by name."""
    if requested in ("auto", "cpu"):
        return torch.device("cpu")
    raise BackendUnavailable(f"device {requested!r} is not supported; accepted: auto, cpu")


def use_native(requested: str) -> bool:
    """Whether the C kernels run. `native` that cannot be had is an error, never a substitution."""
    if requested not in ("auto", "native", "torch"):
        raise SettingRefused("kernels", requested, "auto, native, torch")
    if requested == "torch":
        return False
    if ops.available():
        return True
    if requested == "native":
        raise BackendUnavailable(f"kernels 'native' cannot be used: {ops.unavailable_reason()}")
    return False


def weight_dtype(name: str) -> torch.dtype:
    """bf16 unless named otherwise. Raises SettingRefused."""
    return _dtype("dtype", name, torch.bfloat16)


def kv_dtype(name: str) -> torch.dtype:
    """fp32 unless named otherwise. Raises SettingRefused."""
    return _dtype("kv_dtype", name, torch.float32)


def _dtype(field: str, name: str, default: torch.dtype) -> torch.dtype:
    known = {"auto": default} | DTYPES
    if name not in known:
        raise SettingRefused(field, name, ", ".join(known))
    return known[name]


def numerics_fingerprint(
    config: EngineConfig, native: bool, attention: str, rope_length: int = 0
) -> str:
    """Two engines with equal weights and equal numerics give equal bits. `rope_length` is the
    length that a dynamic RoPE was made for, else 0."""
    parts = (
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        torch.__version__,
        str(torch.get_num_threads()) if not native else "any",
        str(weight_dtype(config.dtype)),
        config.kv_dtype,  # concrete by now
        "native" if native else "torch",
        attention,
        str((config.exact_width, config.kv_bucket, config.prefill_chunk, config.page_tokens)),
        *([f"rope {rope_length}"] if rope_length else []),
    )
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]
