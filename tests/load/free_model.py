"""A target and drafters whose forwards cost nothing but a pause: what is left is the host's work.

The token after `x` is `x + 1`. The engine is the native one with its device step, so that words,
slots, page tables and draws of a step are made as for a GPU; only model and kernels are replaced.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from draft_svc.methods.base import Draft, Method, MethodInfo, Request, RowBlock, RowNeeds
from engine.api import Ask, ModelInfo, Proposed, Sampling
from engine.attention.mode import LayerMode
from engine.attention.report import AttentionReport, Candidate
from engine.attention.triton_attn import TritonAttention
from engine.config import EngineConfig
from engine.device_step import DeviceStepper
from engine.kv.cache import KVCache, KVGeometry
from engine.models.layers import Kernels
from engine.runner import NativeEngine
from tests.load.stamps import Stamps
from tests.service.toy_drafter import ToyDrafter
from tests.service.toy_engine import VOCAB

HIDDEN, LAYERS, TAPS = 576, 6, (0, 1, 2, 3, 4)
PAGE_TOKENS, MAX_LENGTH = 16, 8192
# Of a proposal: the rest is wrong.
RIGHT = 2


def guess(last: int, k: int) -> tuple[int, ...]:
    return tuple((last + 1 + i + (i >= RIGHT)) % VOCAB for i in range(k))


class FreeModel:
    """Implements `engine.models.family.Model` as far as a step needs it."""

    rows_independent = True

    def __init__(self, pause_s: float) -> None:
        self.pause_s = 0.0  # while the engine checks itself

        def draw(logits: Tensor, how: Any, shift: int = 0, out: Tensor | None = None) -> Tensor:
            if self.pause_s:
                time.sleep(self.pause_s)
            tokens = (logits[:, 0].long() + 1) % VOCAB
            return tokens if out is None else out.copy_(tokens)

        unused: Any = None
        self.kernels = Kernels("torch", unused, unused, unused, unused, unused, draw)
        self.embedding = torch.zeros(1, HIDDEN)
        self.head = self.norm = unused

    @property
    def config(self) -> Any:
        return self

    hidden_size = HIDDEN

    def forward(
        self,
        rows: Any,
        cache: Any,
        backend: Any,
        draw_rows: Tensor | None,
        taps: Sequence[int] = (),
        tap_rows: Tensor | None = None,
    ) -> Tensor | None:
        if tap_rows is not None:
            tap_rows.zero_()
        return None if draw_rows is None else rows.ids[draw_rows.long()][:, None].float()

    def logits_of(self, outputs: Tensor) -> Tensor:
        return outputs[:, :1]


class FreeEngine(NativeEngine):
    """Counts its steps and their items, the nanoseconds that its thread computed in them, and those
    (of the wall) between them."""

    def __init__(self, sessions: int, pause_s: float = 0.0) -> None:
        model = FreeModel(pause_s)
        pages = (sessions + 2) * MAX_LENGTH // PAGE_TOKENS // 2 + 1
        geometry = KVGeometry(1, 3, 16, PAGE_TOKENS, torch.bfloat16)
        cache = KVCache(geometry, pages, "cpu")
        backend = TritonAttention(cache, 9, [LayerMode()], torch.bfloat16, processors=132)
        report = AttentionReport(
            "", "auto", backend.name, (Candidate(backend.name),), "bfloat16", 192, PAGE_TOKENS
        )
        info = ModelInfo(
            "free", "free", "free", VOCAB, HIDDEN, LAYERS, MAX_LENGTH, (VOCAB,), "cpu", "bfloat16"
        )
        config = EngineConfig(page_tokens=PAGE_TOKENS)
        scratch = (pages - 1) * PAGE_TOKENS
        stepper = DeviceStepper(model, cache, backend, MAX_LENGTH, scratch, False)  # type: ignore[arg-type]
        super().__init__(config, model, cache, backend, report, info, stepper=stepper)  # type: ignore[arg-type]
        assert self.rows_independent
        model.pause_s = pause_s
        self.steps = self.items = self.step_ns = self.gap_ns = 0
        self.stamps = Stamps()
        self._ended = time.perf_counter_ns()

    def admit_thread(self) -> bool:
        return True

    def step(self, items: Any, *launched: Any) -> Any:
        self.stamps.begin()
        self.gap_ns += time.perf_counter_ns() - self._ended
        began = time.thread_time_ns()
        try:
            return super().step(items, *launched)
        finally:
            self.step_ns += time.thread_time_ns() - began
            self.steps += 1
            self.items += len(items)
            self.stamps.end()
            self._ended = time.perf_counter_ns()


class FreeDrafter(ToyDrafter):
    """In the target's process."""

    def __init__(self, pause_s: float = 0.0) -> None:
        super().__init__()
        self._pause_s = pause_s

    def propose(self, asks: Sequence[Ask]) -> list[Proposed]:
        if self._pause_s:
            time.sleep(self._pause_s)
        return [Proposed(guess(ask.anchor, ask.k)) for ask in asks]


class FreeMethod(Method[list[int]]):
    """In a draft service: reads rows, and proposes from the last id."""

    name: ClassVar[str] = "toy"

    def __init__(self, pause_s: float = 0.0) -> None:
        self._pause_s = pause_s
        self.steps = self.items = 0
        self.stamps = Stamps()

    @property
    def info(self) -> MethodInfo:
        return MethodInfo(
            method="toy",
            name="free",
            max_draft_tokens=7,
            rows=RowNeeds(tap_ids=TAPS, width=len(TAPS) * HIDDEN),
            target_hidden_size=HIDDEN,
            target_layer_count=LAYERS,
            target_vocab_size=VOCAB,
            slot_mode="fill_in",
            block_size=8,
            mask_token_id=VOCAB - 1,
            device="a pause",  # which holds no more of the host than a GPU does
        )

    def open(self, ids: Sequence[int], sampling: Sampling) -> list[int]:
        return list(ids)

    def update(
        self, context: list[int], keep: int, tokens: Sequence[int], rows: Sequence[RowBlock]
    ) -> None:
        self.stamps.begin()
        del context[keep:]
        context += tokens

    def propose(self, requests: Sequence[Request[list[int]]]) -> list[Draft]:
        self.steps += 1
        self.items += len(requests)
        if self._pause_s:
            time.sleep(self._pause_s)
        drafts = [Draft(guess(request.context[-1], request.k)) for request in requests]
        self.stamps.end()
        return drafts

    def close(self, context: list[int]) -> None:
        pass
