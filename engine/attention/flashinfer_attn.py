"""FLASHINFER: the paged prefill wrapper of flashinfer-python, for every kind of step.

One wrapper for each layer mode: a wrapper holds the plan of one mode of one step. Causal layers
see what LayerMode says; non-causal ones all keys of the span. Windows are not offered: the
library's bound the past only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, LayerMode, Span
from engine.errors import BackendUnavailable
from engine.kv.cache import KVCache

_WORKSPACE_BYTES = 256 << 20


def library() -> ModuleType:
    """The package. Raises BackendUnavailable with what it lacks."""
    if not torch.cuda.is_available():
        raise BackendUnavailable("FLASHINFER: no CUDA device is available to torch")
    try:
        import flashinfer
    except (ImportError, OSError, RuntimeError) as error:
        problem = f"FLASHINFER: the package flashinfer-python does not load: {error}"
        raise BackendUnavailable(problem) from error
    return flashinfer  # type: ignore[no-any-return]


def version() -> str:
    """The package's. Raises BackendUnavailable where it does not load."""
    return str(library().__version__)


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """The step that the wrappers were planned for; another plan replaces it."""

    number: int
    rows: int


class FlashInferAttention(AttentionBackend):
    name: ClassVar[str] = "FLASHINFER"
    cache: KVCache
    rows_independent = False
    uncapturable = "its wrappers are planned anew for every step, with a schedule of its own length"

    def __init__(
        self,
        cache: KVCache,
        query_heads: int,
        modes: Sequence[LayerMode],
        dtype: torch.dtype = torch.bfloat16,
        kernel: str = "auto",
    ) -> None:
        """`dtype`: of queries and outputs. `kernel`: the library's name of one (fa2, fa3)."""
        super().__init__(cache, query_heads, modes)
        wrapper = library().BatchPrefillWithPagedKVCacheWrapper
        device = cache.k[0].device
        self._dtype = dtype
        self._wrappers: dict[LayerMode, Any] = {}
        for mode in dict.fromkeys(self.modes):
            assert mode.window is None, "windows are refused when the backend is resolved"
            workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            self._wrappers[mode] = wrapper(workspace, "NHD", backend=kernel)
        self._planned = 0
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def plan(self, spans: Sequence[Span]) -> FlashInferPlan:
        """AB-16: the wrappers stage their plans in pinned memory of their own, so the copies of the
        last plan must be done before the next one is made."""
        spans = [span for span in spans if span.row_count]
        rows = list(accumulate((span.row_count for span in spans), initial=0))
        assert [span.first_row for span in spans] == rows[:-1], "rows of the spans have gaps"
        self._planned += 1
        if spans:
            self._copied.synchronize()
            self._plan_wrappers(spans, rows)
            self._copied.record()
        return FlashInferPlan(self._planned, rows[-1])

    def _plan_wrappers(self, spans: Sequence[Span], rows: Sequence[int]) -> None:
        shape = self.cache.geometry
        page = shape.page_tokens
        ends = [span.start + span.row_count for span in spans]
        held = [-(-end // page) for end in ends]
        pages = [number for span in spans for number in span.pages(page)]
        last = [end - (count - 1) * page for end, count in zip(ends, held, strict=True)]
        page_ends = list(accumulate(held, initial=0))
        words = [torch.tensor(x, dtype=torch.int32) for x in (rows, page_ends, pages, last)]
        for mode, wrapper in self._wrappers.items():
            wrapper.plan(
                *words,
                self.query_heads,
                shape.kv_heads,
                shape.head_dim,
                page,
                causal=mode.causal,
                q_data_type=self._dtype,
                kv_data_type=shape.dtype,
            )

    def run(self, plan: FlashInferPlan, layer: int, q: Tensor) -> Tensor:
        """Rows behind the last span come back as zeros."""
        assert plan.number == self._planned, "the wrappers hold the plan of another step"
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        if plan.rows:
            wrapper = self._wrappers[self.modes[layer]]
            keys = self.cache.k[layer], self.cache.v[layer]
            out[: plan.rows] = wrapper.run(q[: plan.rows].contiguous(), keys)
        return out
