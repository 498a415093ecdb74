"""Where a model runs and what its numbers depend on."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from types import MappingProxyType

import torch

from engine.attention import flashinfer_attn
from engine.config import EngineConfig
from engine.errors import BackendUnavailable, SettingRefused
from engine.kernels import triton
from engine.kernels.cpu import ops
from engine.linear import Mode

_DEVICES = "auto, cpu, cuda, cuda:N"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_KV_DTYPES = {
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
# Raised when kernels of ours come to round otherwise: builds that differ there are told apart.
_ARITHMETIC = "4"
_NO_MORE: Mapping[str, torch.dtype] = MappingProxyType({})


def resolve_device(requested: str) -> torch.device:
    """`auto`: a GPU where torch sees one. Raises BackendUnavailable for what cannot be had."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if requested == "cpu" or (requested == "auto" and not count):
        return torch.device("cpu")
    named = requested.removeprefix("cuda").removeprefix(":") or "0"
    if requested != "auto" and (not requested.startswith("cuda") or not named.isdecimal()):
        raise BackendUnavailable(f"device {requested!r} is not supported; accepted: {_DEVICES}")
    index = 0 if requested == "auto" else int(named)
    if index >= count:
        text = f"device {requested!r} cannot be used: torch sees {count} CUDA devices; accepted: "
        raise BackendUnavailable(text + _DEVICES)
    return torch.device("cuda", index)


def use_device(device: torch.device) -> None:
    """Makes it the one of this thread: Triton launches there, whatever its arguments say."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def kernel_mode(requested: str, device: torch.device) -> Mode:
    """Which kernels run. What was named and cannot be had is an error, never a substitution.

    `native` are the C kernels of the CPU, `triton` those of a GPU (on a CPU under Triton's
    interpreter only); `auto` is the faster of what is there.
    """
    if requested == "triton" or (requested == "auto" and device.type == "cuda"):
        if not (reason := triton.unavailable_reason()):
            return "triton"
        if requested == "triton":
            raise BackendUnavailable(f"kernels 'triton' cannot be used: {reason}")
        return "torch"
    if requested == "native" and device.type == "cuda":
        raise BackendUnavailable("kernels 'native' cannot be used: they are the cpu's")
    if device.type == "cuda":
        return "torch"
    return "native" if use_native(requested) else "torch"


def use_native(requested: str) -> bool:
    """Whether the C kernels run. `native` that cannot be had is an error, never a substitution."""
    if requested not in ("auto", "native", "torch"):
        raise SettingRefused("kernels", requested, "auto, native, triton, torch")
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


def activation_dtype(mode: Mode, weights: str) -> str:
    """By name: Triton's kernels pass on what the weights are, the others fp32."""
    return str(weight_dtype(weights)).removeprefix("torch.") if mode == "triton" else "float32"


def kv_dtype(name: str) -> torch.dtype:
    """fp32 unless named otherwise. Raises SettingRefused."""
    return _dtype("kv_dtype", name, torch.float32, _KV_DTYPES)


def _dtype(
    field: str, name: str, default: torch.dtype, more: Mapping[str, torch.dtype] = _NO_MORE
) -> torch.dtype:
    known = {"auto": default, **DTYPES, **more}
    if name not in known:
        raise SettingRefused(field, name, ", ".join(known))
    return known[name]


def chunk_of(config: EngineConfig, device: torch.device) -> int:
    """Most rows of a prompt in one step. On a GPU a thousand rows of a small model take little
    longer than a few."""
    return config.prefill_chunk or (256 if device.type == "cpu" else 1024)


def numerics_fingerprint(
    config: EngineConfig,
    mode: Mode,
    device: torch.device,
    attention: str,
    rope_length: int = 0,
) -> str:
    """Two engines with equal weights and equal numerics give equal bits. `rope_length` is the
    length that a dynamic RoPE was made for, else 0."""
    parts = (
        _ARITHMETIC,
        *_hardware(mode, device),
        torch.__version__,
        *_compiler(mode, device),
        str(weight_dtype(config.dtype)),
        config.kv_dtype,  # concrete by now
        mode,
        attention,
        *_library(attention),
        str((config.exact_width, config.kv_bucket, chunk_of(config, device), config.page_tokens)),
        *([f"rope {rope_length}"] if rope_length else []),
    )
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def _hardware(mode: Mode, device: torch.device) -> tuple[str, ...]:
    if device.type == "cuda":
        return (torch.cuda.get_device_name(device), str(torch.version.cuda))
    threads = "any" if mode == "native" else str(torch.get_num_threads())
    return (platform.machine(), torch.backends.cpu.get_cpu_capability(), threads)


def _compiler(mode: Mode, device: torch.device) -> tuple[str, ...]:
    """Of kernels that are made where they run, attention's among them."""
    if device.type != "cuda" and mode != "triton":
        return ()
    return (f"triton {triton.version()}",)


def _library(attention: str) -> tuple[str, ...]:
    """Of attention kernels that come in a package of their own."""
    if not attention.startswith("FLASHINFER"):
        return ()
    return (f"flashinfer {flashinfer_attn.version()}",)


def device_name(device: torch.device) -> str:
    """For people: `cpu`, or the index and the GPU's own name."""
    if device.type == "cpu":
        return "cpu"
    return f"{device} {torch.cuda.get_device_name(device)}"
