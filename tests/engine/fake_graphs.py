"""CUDA graphs without CUDA: what is captured is run again when it is replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields
from typing import Any

from torch import Tensor

from engine.graphs import StepGraphs, _Captured

# What a capture is said to take.
CAPTURE_NS = 1_000_000


class _Replayed:
    """As a graph has it: the body of the captured step, and results where that one left them."""

    def __init__(self, body: Callable[[], Any]) -> None:
        self._body, self.outputs = body, body()

    def replay(self) -> None:
        found = self._body()
        if found is None:
            return
        for field in fields(self.outputs):
            held = getattr(self.outputs, field.name)
            if isinstance(held, Tensor):
                held.copy_(getattr(found, field.name))


class FakeGraphs(StepGraphs[Any]):
    """`keys` are those captured, in order."""

    def __init__(self) -> None:
        super().__init__("fake", True)
        self.keys: list[Hashable] = []

    def _capture(self, key: Hashable, body: Callable[[], Any]) -> _Captured[Any]:
        self.spent_ns += CAPTURE_NS
        self.keys.append(key)
        replayed = _Replayed(body)
        return _Captured(replayed, replayed.outputs)
