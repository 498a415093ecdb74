"""Exceptions of the engine: plain, without gRPC. The services map them to the error catalogue."""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything the engine raises on purpose. The text names field, value and what is
    accepted; never a path but one that a setting named, and that at start only."""


class OutOfPages(EngineError):
    """The pool cannot give the pages asked for."""

    def __init__(self, needed: int, free: int, total: int) -> None:
        super().__init__(f"{needed} KV pages needed, {free} of {total} free")
        self.needed, self.free, self.total = needed, free, total


class CheckpointError(EngineError):
    """A checkpoint that cannot be loaded: a missing, extra or misshapen tensor, an unsupported
    config value, a corrupt file."""


class BackendUnavailable(EngineError):
    """No attention backend fits, or the requested one does not; the text lists every candidate
    with its reasons."""


class SettingRefused(EngineError):
    """A setting with a value that the engine does not know."""

    def __init__(self, field: str, value: object, accepted: str) -> None:
        super().__init__(f"{field} = {value!r} is not supported; accepted: {accepted}")
