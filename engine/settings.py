"""Settings of an engine as a service offers them: mixed into the settings of both services."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from engine.config import EngineConfig

# What backends of ours take, each some of it; fp8 is what its backend stores as such.
KV_DTYPES = (
    "auto, float32, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2 or fp8_ds_mla (latent attention), "
    "of which each attention backend has some"
)


class EngineSettings(BaseModel):
    """How a service loads and runs its model; which one is the service's own setting."""

    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="dtype of the weights: auto, bfloat16 or float32"
    )
    kv_dtype: str = Field(
        "auto", description=f"dtype of the KV cache, the service's own: {KV_DTYPES}"
    )
    device: str = Field("auto", description="auto (a GPU where there is one), cpu, cuda or cuda:N")
    attention_backend: str | None = Field(
        None,
        description="auto, or a backend by name; refused, never replaced, when it does not fit",
    )
    cuda_graph_mode: str = Field(
        "auto", description="auto, NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE"
    )
    kernels: Literal["auto", "native", "triton", "torch"] = Field(
        "auto", description="native: C, on the CPU; triton: on a GPU; torch: plain operators"
    )
    threads: int = Field(0, ge=0, le=1024, description="threads of the engine; 0: as many as cores")
    max_length: int | None = Field(
        None, ge=2, description="longest session in tokens; unset: what model and KV pages allow"
    )
    page_tokens: int = Field(16, ge=1, le=4096, description="tokens of one KV page")
    kv_pages: int | None = Field(None, ge=1, description="KV pages; unset: from kv_memory_mb")
    kv_memory_mb: int = Field(1024, ge=1, description="memory of the KV cache in MiB")
    prefill_chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="prompt tokens that one step runs beside those of other sessions; unset: 256 "
        "on a CPU, 1024 on a GPU",
    )
    warm_sessions: int = Field(
        8,
        ge=0,
        le=128,
        description="sessions at once up to which every shape of a step is met before the service "
        "says that it serves, on a GPU: kernels compiled, graphs captured; 1 to 3 are 4 for a "
        "target, which measures steps of so many; 0: each when a session first meets it",
    )

    def engine_config(
        self, model: str, role: Literal["target", "draft"] = "target"
    ) -> EngineConfig:
        return EngineConfig(
            model=model,
            role=role,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            device=self.device,
            attention_backend=self.attention_backend,
            cuda_graph_mode=self.cuda_graph_mode,
            kernels=self.kernels,
            max_length=self.max_length,
            kv_pages=self.kv_pages,
            kv_memory_mb=self.kv_memory_mb,
            page_tokens=self.page_tokens,
            threads=self.threads,
            prefill_chunk=self.prefill_chunk_tokens,
        )
