"""CUDA graphs without CUDA: what is captured is run again when it is replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from engine.graphs import StepGraphs, _Captured

# What a capture is said to take.
CAPTURE_NS = 1_000_000


class _Replayed:
    def __init__(self, body: Callable[[], Any]) -> None:
        self.replay = body


class FakeGraphs(StepGraphs[Any]):
    """`keys` are those captured, in order."""

    def __init__(self) -> None:
        super().__init__("fake", True)
        self.keys: list[Hashable] = []

    def _capture(self, key: Hashable, body: Callable[[], Any]) -> _Captured[Any]:
        self.spent_ns += CAPTURE_NS
        self.keys.append(key)
        return _Captured(_Replayed(body), body())
