"""CUDA graphs by shape: captured when a shape is first met, replayed from then on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

log = logging.getLogger(__name__)

T = TypeVar("T")

# Runs before a capture: kernels compile, libraries take their workspace.
_WARM_UP = 2


def up_to(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Of rising `sizes` those that are taken for 1 to `most`."""
    return tuple(size for size, below in zip(sizes, (0, *sizes), strict=False) if below < most)


@dataclass(frozen=True, slots=True)
class _Captured(Generic[T]):
    graph: Any
    outputs: T


class StepGraphs(Generic[T]):
    """Graphs of bodies that read static memory only; without `enabled` every body just runs.

    Their memory is one pool: only one of them runs at a time, and what it returns is overwritten by
    the next replay. Other threads may use the device meanwhile.
    """

    def __init__(self, name: str, enabled: bool) -> None:
        self.name, self.enabled = name, enabled
        self._captured: dict[Hashable, _Captured[T]] = {}
        self._pool: Any = None
        self._aside: Any = None
        # Those whose captures found no memory.
        self._run_only: set[Hashable] = set()
        # Nanoseconds that captures took so far.
        self.spent_ns = 0

    def run(
        self, key: Hashable, body: Callable[[], T], capture: bool = True, needed: bool = False
    ) -> T:
        """What `body` returns, by replay; `key` stands for all that shapes it. Without `capture` a
        shape that is met for the first time is only run. One whose capture finds no memory is only
        run now and from now on; where the graph is `needed` that raises OutOfMemoryError."""
        known = self._captured.get(key)
        if known is None and self.enabled and capture and key not in self._run_only:
            known = self._held(key, body, needed)
        if known is None:
            return body()
        known.graph.replay()
        return known.outputs

    def _held(self, key: Hashable, body: Callable[[], T], needed: bool) -> _Captured[T] | None:
        try:
            captured = self._captured[key] = self._capture(key, body)
            return captured
        except torch.OutOfMemoryError:
            if needed:
                raise
        # Behind the handler: the error holds on to what the body had.
        log.warning("no memory for the %s graph of %s: it runs without one", self.name, key)
        self._run_only.add(key)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

    def _capture(self, key: Hashable, body: Callable[[], T]) -> _Captured[T]:
        began = time.perf_counter_ns()
        try:
            captured = self._capture_aside(body)
        finally:
            spent_ns = time.perf_counter_ns() - began
            self.spent_ns += spent_ns
        log.info("captured the %s graph of %s in %.0f ms", self.name, key, spent_ns / 1e6)
        return captured

    def _capture_aside(self, body: Callable[[], T]) -> _Captured[T]:
        # One stream for all: libraries keep a workspace for each that they ever ran on.
        if self._aside is None:
            self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside = self._aside
        aside.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(aside):
                for _ in range(_WARM_UP):
                    body()
        finally:  # whatever runs instead writes to the same memory
            torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # The mode "global" would fail the capture, and them, when other threads wait for an event
        # or allocate.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=aside, capture_error_mode=mode):
            outputs = body()
        self._pool = self._pool or graph.pool()
        return _Captured(graph, outputs)
