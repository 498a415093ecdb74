"""Draws on the device: from logits there to tokens, without a host in between."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.draw_rows import DrawRows, draw_words, write_draws
from engine.models.layers import Kernels
from engine.sampling import Draw, draw, filters, margins_of
from engine.step_words import StepWords

__all__ = ["DeviceDrawer", "DrawRows", "draw_words", "write_draws"]


class DeviceDrawer:
    """Chooses tokens from logits on the device; what it is called with is `choose.Drawer`'s."""

    def __init__(self, kernels: Kernels, device: torch.device) -> None:
        self._kernels, self._device = kernels, device
        self._words = StepWords(device)

    @property
    def fused(self) -> bool:
        """Whether `draw` may be called: without it rows are drawn through the host."""
        return self._kernels.draw is not None

    def draw(
        self, logits: Tensor, how: DrawRows, out: Tensor | None = None, shift: int = 0
    ) -> Tensor:
        """Tokens int64 [rows] of logits fp32 [rows, vocab], in `out` where it is given, `shift`
        positions behind those of `how`. Nothing is read by the host."""
        assert self._kernels.draw is not None
        return self._kernels.draw(logits, how, shift=shift, out=out)

    def __call__(
        self, logits: Tensor, draws: Sequence[Draw], margins: bool
    ) -> tuple[list[int], list[float]]:
        if not self.fused:
            return draw(logits, draws, margins, self._kernels.gumbel_argmax)
        rows = len(draws)
        self._words.layout(draws=draw_words(rows))
        write_draws(self._words.host("draws"), rows, enumerate(draws))
        self._words.upload()
        filtered = any(filters(how.sampling) for how in draws)
        how = DrawRows.of(self._words.device("draws"), rows, filtered)
        tokens: list[int] = self.draw(logits, how).tolist()
        return tokens, margins_of(logits, draws) if margins else []
