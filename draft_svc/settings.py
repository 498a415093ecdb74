"""Settings of the draft service: one frozen object, built once at start."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from draft_svc.loading import DEFAULT_METHODS, METHODS
from draft_svc.protocol import Limits
from engine.settings import EngineSettings
from specwire.settings import ServiceSettings


class DraftSettings(EngineSettings, ServiceSettings):
    """Every setting is a flag (`--rows-wait-ms`), a variable (`SPECWIRE_DRAFT_ROWS_WAIT_MS`) or a
    key of the file.
    """

    model_config = SettingsConfigDict(env_prefix="SPECWIRE_DRAFT_")

    address: str = Field("unix:/tmp/specwire-draft.sock", description="where to listen")
    push_address: str = Field(
        "", description="address that targets send rows to; empty: the one they were told of"
    )
    methods: tuple[str, ...] = Field(
        DEFAULT_METHODS, min_length=1, description="drafters to host, of " + ", ".join(METHODS)
    )
    default_method: str = Field("", description="drafter of sessions that name none; empty: last")
    draft: str = Field("default", description="DFlash checkpoint: a directory, or `default`")
    dspark: str = Field("default", description="DSpark checkpoint: a directory, or `default`")
    draft_model: str = Field(
        "",
        description="model of draft_model, with the target's tokenizer: a directory, a .gguf file, "
        "or `default`",
    )
    hybrid_neural: Literal["dflash", "dspark", "draft_model"] = Field(
        "dflash", description="what hybrid chooses from beside the n-gram lookup"
    )
    target: str = Field(
        "default",
        description="the target's checkpoint, or `default`: embedding and head of dflash and "
        "dspark, tokenizer of draft_model",
    )
    head_dtype: Literal["auto", "int8", "model"] = Field(
        "auto",
        description="vocabulary head of dflash and dspark: int8, or as the model has it; auto: "
        "int8 where the CPU has int8 dot products",
    )
    max_draft_tokens: int = Field(7, ge=1, le=64, description="most tokens of one proposal")
    kv_memory_mb: int = Field(128, ge=1, description="memory of one drafter's KV cache in MiB")
    prefill_chunk_tokens: int = Field(
        128, ge=1, description="tokens of one forward of draft_model that catches up"
    )
    confidences: bool = Field(
        False,
        description="send the draft's own probability of each token, which takes time in dflash; "
        "what a confidence head says is sent in any case",
    )
    ngram_min: int = Field(2, ge=1, le=32, description="shortest n-gram that is looked up")
    ngram_max: int = Field(4, ge=1, le=32, description="longest n-gram that is looked up")
    rows_wait_ms: int = Field(
        200,
        ge=0,
        description="how long a step waits for its hidden-state rows before it goes without",
    )
    rows_buffer_mb: int = Field(
        64, ge=1, description="rows that one session may have waiting for confirmation, in MiB"
    )
    max_sessions: int = Field(256, ge=1, description="sessions that may be open at once")
    lease_ms: int = Field(
        10_000,
        ge=100,
        description="life of a session without traffic, where its opener does not say",
    )
    max_lease_ms: int = Field(600_000, ge=100, description="longest lease an opener may ask for")
    drain_ms: int = Field(2_000, ge=0, description="time that running sessions get at shutdown")
    busy_poll_us: int | None = Field(
        None,
        ge=0,
        description="how long the event loop polls, instead of sleeping, for the next question of "
        "a session that asks alone; 0: not at all; unset: 10000 with a GPU and 8 cores or more",
    )
    reflection: bool = Field(True, description="answer gRPC reflection, for grpcurl and friends")
    metrics_port: int = Field(0, ge=0, le=65535, description="Prometheus metrics; 0: off")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="what is logged"
    )

    @field_validator("methods")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not set(names) <= set(METHODS):
            raise ValueError(", ".join(METHODS))
        return tuple(dict.fromkeys(names))

    @model_validator(mode="before")
    @classmethod
    def _methods_that_fit(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The shipped drafts are for the default target: another one needs drafts of its own, and
        hosts what it names one for."""
        if given.get("target", "default") == "default" or "dspark" in given:
            return given
        fitting = tuple(name for name in DEFAULT_METHODS if name != "dspark")
        return {"methods": fitting} | given

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.default_method and self.default_method not in self.methods:
            raise ValueError(f"default_method must be one of methods: {', '.join(self.methods)}")
        hosted = {*self.methods, *([self.hybrid_neural] if "hybrid" in self.methods else [])}
        if "draft_model" in hosted and not self.draft_model:
            raise ValueError("draft_model must name a checkpoint where that method is hosted")
        if self.ngram_min > self.ngram_max:
            raise ValueError("ngram_min must not exceed ngram_max")
        return self

    @property
    def chosen_default(self) -> str:
        """The method of sessions that name none."""
        return self.default_method or self.methods[-1]

    def limits(self) -> Limits:
        return Limits(
            max_sessions=self.max_sessions,
            rows_wait_ms=self.rows_wait_ms,
            rows_buffer_bytes=self.rows_buffer_mb * 1024 * 1024,
            lease_ms=self.lease_ms,
            max_lease_ms=self.max_lease_ms,
        )
