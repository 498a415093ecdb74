"""Settings of a native engine: frozen, built once by the service that owns the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to load and run a target.

    model          a Hugging Face directory, a .gguf file, or "default" (the packaged model)
    dtype          of the weights: auto, bfloat16 or float32; activations are fp32 on the CPU
    kv_dtype       auto, or what the attention backend has; refused with the backends' reasons
    attention_backend, cuda_graph_mode  see engine/attention/request.py
    role           whom refusals and logs name; a draft is an ordinary model that drafts
    device         auto (a GPU where there is one), cpu, cuda or cuda:N
    kernels        native: our C kernels or an error; triton: ours on a GPU, or an error; torch:
                   neither; auto: those of the device if they can be had
    max_length     longest session in tokens; None: the model's own limit, or what the pages hold
                   if that is less. With `dynamic` RoPE the model's is the original length (a longer
                   one turns all positions by its own theta)
    kv_pages       pages of the pool; None derives them from `kv_memory_mb`
    threads        0 leaves torch's own choice
    exact_width    rows of a verify block in exact mode; only where rows are not independent
    kv_bucket      no exact block crosses a multiple of this; only where rows are not independent
    prefill_chunk  most rows of a prompt in one step, and edge of the absolute grid on which prompts
                   are cut where rows are not independent; None: 256 on a CPU, 1024 on a GPU
    """

    model: str = "default"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    kv_dtype: str = "auto"
    device: str = "auto"
    attention_backend: str | None = None
    cuda_graph_mode: str = "auto"
    role: Literal["target", "draft"] = "target"
    kernels: Literal["auto", "native", "triton", "torch"] = "auto"
    max_length: int | None = None
    kv_pages: int | None = None
    kv_memory_mb: int = 1024
    page_tokens: int = 16
    threads: int = 0
    exact_width: int = 8
    kv_bucket: int = 256
    prefill_chunk: int | None = None
