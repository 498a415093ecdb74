"""The error catalogue, shared by servers and clients: what can go wrong, and how it travels.

On a call an error is a `google.rpc.Status` with details; on a link it is an `ItemError`.
Clients branch on `reason` only. Messages never hold prompt text, file paths or tracebacks.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from specwire.v1 import common_pb2

DOMAIN = "specwire"
# Statuses travel in HTTP/2 trailers, twice (text and details), and trailers are small.
_MESSAGE_CHARS = 600
_VALUE_CHARS = 120


class Reason(StrEnum):
    FIELD_INVALID = "FIELD_INVALID"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    VOCAB_RANGE = "VOCAB_RANGE"
    MODEL_UNKNOWN = "MODEL_UNKNOWN"
    METHOD_UNKNOWN = "METHOD_UNKNOWN"
    KV_PAGES_EXHAUSTED = "KV_PAGES_EXHAUSTED"
    QUEUE_FULL = "QUEUE_FULL"
    DRAINING = "DRAINING"
    ENGINE_DOWN = "ENGINE_DOWN"
    NO_TARGET = "NO_TARGET"
    # Nothing answers at the address: said by the caller's own side.
    UNREACHABLE = "UNREACHABLE"
    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    SESSION_UNKNOWN = "SESSION_UNKNOWN"
    NEED_TOKENS = "NEED_TOKENS"
    STALE_STEP = "STALE_STEP"
    MODEL_MISMATCH = "MODEL_MISMATCH"
    ROWS_REFUSED = "ROWS_REFUSED"
    PUSH_ADDRESS_REFUSED = "PUSH_ADDRESS_REFUSED"
    DEADLINE = "DEADLINE"
    CANCELLED = "CANCELLED"
    UNSUPPORTED = "UNSUPPORTED"
    BACKEND_UNAVAILABLE = "BACKEND_UNAVAILABLE"
    CHECKPOINT_INVALID = "CHECKPOINT_INVALID"
    PORT_IN_USE = "PORT_IN_USE"
    SETTINGS_INVALID = "SETTINGS_INVALID"
    INTERNAL = "INTERNAL"

    @property
    def code(self) -> grpc.StatusCode:
        return _CATALOGUE[self][0]

    @property
    def retry_after_ms(self) -> int:
        """How long to wait before trying again; 0: trying again does not help."""
        return _CATALOGUE[self][1]


_C = grpc.StatusCode
_CATALOGUE: dict[Reason, tuple[grpc.StatusCode, int]] = {
    Reason.FIELD_INVALID: (_C.INVALID_ARGUMENT, 0),
    Reason.PROMPT_TOO_LONG: (_C.INVALID_ARGUMENT, 0),
    Reason.VOCAB_RANGE: (_C.INVALID_ARGUMENT, 0),
    Reason.MODEL_UNKNOWN: (_C.NOT_FOUND, 0),
    Reason.METHOD_UNKNOWN: (_C.INVALID_ARGUMENT, 0),
    Reason.KV_PAGES_EXHAUSTED: (_C.RESOURCE_EXHAUSTED, 500),
    Reason.QUEUE_FULL: (_C.RESOURCE_EXHAUSTED, 500),
    Reason.DRAINING: (_C.UNAVAILABLE, 1000),
    Reason.ENGINE_DOWN: (_C.UNAVAILABLE, 1000),
    Reason.NO_TARGET: (_C.UNAVAILABLE, 1000),
    Reason.UNREACHABLE: (_C.UNAVAILABLE, 200),
    Reason.MESSAGE_TOO_LARGE: (_C.RESOURCE_EXHAUSTED, 0),
    Reason.SESSION_UNKNOWN: (_C.NOT_FOUND, 0),
    Reason.NEED_TOKENS: (_C.FAILED_PRECONDITION, 0),
    Reason.STALE_STEP: (_C.ABORTED, 0),
    Reason.MODEL_MISMATCH: (_C.FAILED_PRECONDITION, 0),
    Reason.ROWS_REFUSED: (_C.FAILED_PRECONDITION, 0),
    Reason.PUSH_ADDRESS_REFUSED: (_C.PERMISSION_DENIED, 0),
    Reason.DEADLINE: (_C.DEADLINE_EXCEEDED, 0),
    Reason.CANCELLED: (_C.CANCELLED, 0),
    Reason.UNSUPPORTED: (_C.UNIMPLEMENTED, 0),
    Reason.BACKEND_UNAVAILABLE: (_C.FAILED_PRECONDITION, 0),
    Reason.CHECKPOINT_INVALID: (_C.FAILED_PRECONDITION, 0),
    Reason.PORT_IN_USE: (_C.FAILED_PRECONDITION, 0),
    Reason.SETTINGS_INVALID: (_C.INVALID_ARGUMENT, 0),
    Reason.INTERNAL: (_C.INTERNAL, 0),
}

# What a bare status code means when no Specwire server said more (the gRPC library itself spoke).
_BARE: dict[grpc.StatusCode, Reason] = {
    _C.CANCELLED: Reason.CANCELLED,
    _C.DEADLINE_EXCEEDED: Reason.DEADLINE,
    _C.UNAVAILABLE: Reason.UNREACHABLE,
    _C.UNIMPLEMENTED: Reason.UNSUPPORTED,
    _C.INVALID_ARGUMENT: Reason.FIELD_INVALID,
    _C.RESOURCE_EXHAUSTED: Reason.QUEUE_FULL,
}
# What gRPC says then names sockets, methods and numbers of its own; it stays the cause.
_UNANSWERED = {
    Reason.UNREACHABLE: "no {role} answers at {address}: not there, not there yet, or gone; check "
    "that it runs and that this is its address",
    Reason.UNSUPPORTED: "what answers at {address} is no Specwire {role}, or an older one that "
    "does not know this call; check its address and version",
    Reason.DEADLINE: "the {role} at {address} took longer than the call allowed; where it never "
    "answers, check that this is its address",
}


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


class SpecwireError(Exception):
    """An error with a reason from the catalogue."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        metadata: Mapping[str, str] | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = _clip(message, _MESSAGE_CHARS)
        self.metadata = {k: _clip(str(v), _VALUE_CHARS) for k, v in (metadata or {}).items()}
        self.retry_after_ms = reason.retry_after_ms if retry_after_ms is None else retry_after_ms

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"

    @property
    def code(self) -> grpc.StatusCode:
        return self.reason.code

    @classmethod
    def field(
        cls, field: str, value: object, accepted: str, reason: Reason = Reason.FIELD_INVALID
    ) -> SpecwireError:
        """An input field with a value that is not accepted. Never pass text of a prompt."""
        shown = _clip(repr(value) if isinstance(value, str) else str(value), _VALUE_CHARS)
        message = f"{field} is {shown}; accepted: {accepted}"
        return cls(reason, message, {"field": field, "value": shown, "accepted": accepted})

    def to_status(self) -> status_pb2.Status:
        """The error as a rich status: ErrorInfo always, BadRequest and RetryInfo where they fit."""
        details: list[Any] = [
            error_details_pb2.ErrorInfo(
                reason=self.reason.value, domain=DOMAIN, metadata=self.metadata
            )
        ]
        if self.code is _C.INVALID_ARGUMENT and "field" in self.metadata:
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=self.metadata["field"], description=self.message
            )
            details.append(error_details_pb2.BadRequest(field_violations=[violation]))
        if self.retry_after_ms:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromMilliseconds(self.retry_after_ms)
            details.append(retry)
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        return status

    def to_item(self) -> common_pb2.ItemError:
        return common_pb2.ItemError(
            reason=self.reason.value,
            message=self.message,
            metadata=self.metadata,
            retry_after_ms=self.retry_after_ms,
        )


def from_item(item: common_pb2.ItemError) -> SpecwireError:
    return _decoded(
        item.reason, Reason.INTERNAL, item.message, dict(item.metadata), item.retry_after_ms
    )


def from_rpc_error(error: grpc.RpcError, address: str = "", role: str = "server") -> SpecwireError:
    """The typed form of what a call raised, whether a Specwire server or gRPC itself spoke.

    `address` is where the call went, `role` who was to answer there: an error that nobody does, or
    somebody else, names both.
    """
    call: Any = error  # both stacks raise objects that also have the accessors of a call
    code: grpc.StatusCode = call.code() or _C.UNKNOWN
    text: str = call.details() or code.name.lower()
    bare = _BARE.get(code, Reason.INTERNAL)
    if code is _C.RESOURCE_EXHAUSTED and "message larger than max" in text:
        bare = Reason.MESSAGE_TOO_LARGE
    status = _status_of(error)
    if status is None and address and bare in _UNANSWERED:
        values = {"address": address, "role": role}
        return SpecwireError(bare, _UNANSWERED[bare].format(**values), values)
    if status is None:
        return SpecwireError(bare, text)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details:
        for known in (info, retry):
            detail.Unpack(known)  # does nothing when the types differ
    if info.domain != DOMAIN:
        return SpecwireError(bare, status.message or text)
    delay_ms = retry.retry_delay.ToMilliseconds()
    return _decoded(info.reason, bare, status.message, dict(info.metadata), delay_ms)


def _status_of(error: grpc.RpcError) -> status_pb2.Status | None:
    # The synchronous reader serves both stacks: an aio error object has the same accessors, while
    # the library's asynchronous reader fails on it.
    try:
        status: status_pb2.Status | None = rpc_status.from_call(error)
    except ValueError:  # trailers that contradict themselves: fall back to the bare code
        return None
    return status


def _decoded(
    name: str, fallback: Reason, message: str, metadata: dict[str, str], retry_after_ms: int
) -> SpecwireError:
    """A reason that this version does not know keeps its name in the metadata."""
    try:
        reason = Reason(name)
    except ValueError:
        reason, metadata = fallback, {**metadata, "reason": name}
    return SpecwireError(reason, message, metadata, retry_after_ms)


def internal_error(log: logging.Logger, what: str, error: BaseException) -> SpecwireError:
    """For a bug of ours: the traceback goes to the log, an incident number to the client."""
    incident = secrets.token_hex(8)
    log.error("incident %s: %s", incident, what, exc_info=error)
    text = f"internal error; the server's log has incident {incident}"
    return SpecwireError(Reason.INTERNAL, text, {"incident": incident})
