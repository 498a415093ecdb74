"""Settings of the target service: one frozen object, built once at start."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from engine.settings import EngineSettings
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
        64 * 1024 * 1024,
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
    drain_ms: int = Field(5_000, ge=0, description="time that running sessions get at shutdown")
    reflection: bool = Field(True, description="answer gRPC reflection, for grpcurl and friends")
    metrics_port: int = Field(0, ge=0, le=65535, description="Prometheus metrics; 0: off")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="what is logged"
    )
