"""Settings of the coordinator: one frozen object, built once at start."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from specwire.rpc import ADDRESSES, is_address
from specwire.settings import ServiceSettings


class CoordinatorSettings(ServiceSettings):
    """Every setting is a flag (`--max-sessions`), a variable (`SPECWIRE_COORDINATOR_MAX_SESSIONS`)
    or a key of the file.
    """

    model_config = SettingsConfigDict(env_prefix="SPECWIRE_COORDINATOR_")

    address: str = Field("unix:/tmp/specwire-coordinator.sock", description="where to listen")
    target: tuple[str, ...] = Field(
        ("unix:/tmp/specwire-target.sock",), description="addresses of the targets, at least one"
    )
    draft: tuple[str, ...] = Field(
        (), description="addresses of draft services; none: plain decoding"
    )
    default_method: str = Field(
        "", description="drafter of requests that name none; empty: the draft's default"
    )
    num_speculative_tokens: int = Field(
        3, ge=1, le=64, description="draft tokens a round where a request does not say"
    )
    adaptive_k: bool = Field(
        True,
        description="choose the draft tokens of each round by measured cost and acceptance where "
        "a request does not say; num_speculative_tokens is the first guess then",
    )
    exactness: Literal["", "exact", "fast"] = Field(
        "", description="what a request gets that does not say; empty: the target's default"
    )
    max_sessions: int = Field(
        256, ge=1, description="answers that may run at once; a request for n counts n times"
    )
    lease_ms: int = Field(
        10_000, ge=300, description="life of a worker's session without a sign of ours"
    )
    row_window: int = Field(
        512, ge=0, description="most cached prompt tokens run again for rows that a draft lacks"
    )
    free_run: int = Field(
        32, ge=0, le=1024, description="plain steps the target may run ahead of being asked"
    )
    draft_ahead: int = Field(
        8,
        ge=0,
        le=1024,
        description="rounds a target may go on by itself with the drafter in its process, or with "
        "a draft service that reads its rows, before it is told how; 0: each round is asked for",
    )
    proposal_wait_share: float = Field(
        1.5,
        gt=0,
        description="longest wait for a proposal, as a share of a target step at the present load; "
        "longer where proposals take longer, up to the steps that one can save",
    )
    proposal_wait_min_ms: int = Field(
        30, ge=1, description="wait for a proposal that is always granted"
    )
    draft_open_ms: int = Field(
        1_000, ge=1, description="wait for a draft to open a session before going on without"
    )
    breaker_lates: int = Field(
        3, ge=1, description="times in a row a draft is late before it is left alone"
    )
    breaker_open_ms: int = Field(2_000, ge=1, description="for how long it is left alone")
    target_return_ms: int = Field(
        15_000, ge=0, description="how long a running request waits for a lost target"
    )
    target_moves: int = Field(
        3, ge=0, description="times a request is opened again, here or elsewhere, at a lost target"
    )
    drain_ms: int = Field(5_000, ge=0, description="time running requests get at shutdown")
    reflection: bool = Field(True, description="answer gRPC reflection, for grpcurl and friends")
    metrics_port: int = Field(0, ge=0, le=65535, description="Prometheus metrics; 0: off")
    log_stats_s: float = Field(
        10.0, ge=0, le=86_400, description="seconds between two lines of the load; 0: none"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="what is logged"
    )

    @field_validator("target", "draft")
    @classmethod
    def _addresses(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not value and info.field_name == "target":
            raise ValueError("at least one address")
        if len(set(value)) < len(value):
            raise ValueError("each address once")
        if not all(map(is_address, value)):
            raise ValueError(ADDRESSES)
        return value
