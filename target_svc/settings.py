"""Settings of the target service: one frozen object, built once at start."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from engine.colocated import DrafterSettings
from engine.settings import KV_DTYPES, EngineSettings
from specwire.settings import ServiceSettings


class TargetSettings(EngineSettings, ServiceSettings):
    """The target service: owns a model and its KV pages, draws every token, exports rows."""

    model_config = SettingsConfigDict(env_prefix="SPECWIRE_TARGET_")

    address: str = Field("unix:/tmp/specwire-target.sock", description="where to listen")
    model: str = Field("default", description="a directory, a .gguf file, or `default`")
    exactness: Literal["exact", "fast"] = Field(
        "exact", description="what a session gets that does not say"
    )
    max_draft_tokens: int = Field(7, ge=0, le=64, description="most draft ids of a verify step")
    preempt_idle_ms: int = Field(
        500,
        ge=0,
        description="a session without a step for so long gives its pages to any that needs some",
    )
    max_waiting: int = Field(256, ge=0, description="sessions that may wait for KV pages")
    lease_ms: int = Field(
        10_000,
        ge=100,
        description="life of a session without traffic, unless its opener names one",
    )
    push_allow: tuple[str, ...] = Field(
        ("unix:*", "localhost:*", "127.0.0.1:*", "[[]::1]:*"),
        description="draft addresses that rows may be sent to, as shell patterns",
    )
    push_max_streams: int = Field(16, ge=1, description="draft addresses with open row streams")
    push_queue_bytes: int = Field(
        256 * 1024 * 1024,
        ge=1024,
        description="rows waiting for one draft; more are dropped",
    )
    push_window_bytes: int = Field(
        32 * 1024 * 1024, ge=1024, description="rows in flight to one draft before it gives credit"
    )
    row_history_tokens: int = Field(
        512,
        ge=0,
        description="recent rows kept for each session, to send them again; also the cached tokens "
        "run again for rows that a draft lacks, unless its opener names a number",
    )
    colocate: str = Field(
        "",
        description="drafter to run in this process, in the target's own pages: dflash, dspark, or "
        "one that an installed package registers; empty: none",
    )
    draft_checkpoint: str = Field(
        "default", description="checkpoint of the co-located draft: a directory, or `default`"
    )
    draft_attention_backend: str | None = Field(
        None,
        description="auto, inherit (the target's), or a backend by name; unset: as the kind of its "
        "KV group has it",
    )
    draft_kv_group: Literal["auto", "same_cache", "pooled"] = Field(
        "auto",
        description="same_cache: the KV layout of the target; pooled: the draft's own; both under "
        "the target's page tables; auto: as the two models' attention allows",
    )
    draft_kv_dtype: str = Field(
        "auto", description=f"dtype of the draft's KV, its own: {KV_DTYPES}"
    )
    draft_dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="dtype of the draft's weights: auto, bfloat16 or float32"
    )
    draft_head_dtype: Literal["auto", "int8", "model"] = Field(
        "auto",
        description="vocabulary head of the draft: int8, or the target's own, shared; auto: int8 "
        "where the CPU has int8 dot products",
    )
    draft_cuda_graph_mode: str = Field("auto", description="CUDA graph mode of the draft")
    draft_max_tokens: int = Field(7, ge=1, le=64, description="most tokens of one proposal")
    draft_max_length: int | None = Field(
        None, ge=2, description="length behind which it does not propose; unset: the model's limit"
    )
    draft_confidences: bool = Field(
        False,
        description="send the draft's own probability of each token; what a confidence head says "
        "is sent in any case",
    )
    draft_context: Literal["all", "own"] = Field(
        "all",
        description="whose steps write the draft's context: all sessions', so that every cached "
        "prefix has it, or those that were opened for it",
    )
    warm_taps: tuple[int, ...] = Field(
        (),
        description="layers whose rows draft services will ask for, rising from 0 on: with "
        "warm_sessions, graphs of steps that send them; empty: those of warm_draft",
    )
    warm_draft: str = Field(
        "default",
        description="the draft services' block draft, to know warm_taps from: a directory; "
        "`default`, beside the default model; or empty. On a CPU read for project_rows only",
    )
    project_rows: bool | None = Field(
        None,
        description="apply the `fc` and norm of warm_draft to the rows that its services are sent: "
        "mostly as many times fewer bytes as it reads layers; unset: with a GPU, where "
        "warm_draft has weights",
    )
    drain_ms: int = Field(5_000, ge=0, description="time that running sessions get at shutdown")
    busy_poll_us: int | None = Field(
        None,
        ge=0,
        description="how long the event loop polls, instead of sleeping, for a draft service's "
        "answer to the only session; 0: not at all; unset: 10000 with a GPU and 8 cores or more",
    )
    reflection: bool = Field(True, description="answer gRPC reflection, for grpcurl and friends")
    metrics_port: int = Field(0, ge=0, le=65535, description="Prometheus metrics; 0: off")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="what is logged"
    )

    @field_validator("warm_taps")
    @classmethod
    def _rising(cls, taps: tuple[int, ...]) -> tuple[int, ...]:
        if list(taps) != sorted({tap for tap in taps if tap >= 0}):
            raise ValueError("layers of the model, rising from 0 on")
        return taps

    def drafter_settings(self) -> DrafterSettings:
        """What the co-located drafter is told: values of its own."""
        return DrafterSettings(
            checkpoint=self.draft_checkpoint,
            model=self.model,
            attention_backend=self.draft_attention_backend,
            kv_group=self.draft_kv_group,
            kv_dtype=self.draft_kv_dtype,
            dtype=self.draft_dtype,
            head_dtype=self.draft_head_dtype,
            kernels=self.kernels,
            cuda_graph_mode=self.draft_cuda_graph_mode,
            max_draft_tokens=self.draft_max_tokens,
            max_length=self.draft_max_length,
            confidences=self.draft_confidences,
            warm_sessions=self.warm_sessions,
        )
