"""Draws on the device: how every row draws, as words of the step, for the kernel that draws."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.models.layers import Kernels
from engine.sampling import Draw, draw, margins_of
from engine.step_words import StepWords, Words

# temperature, min_p, top_p (fp32), top_k, choice, index, seed (64 bits): one array after another.
DRAW_WORDS = 8


def write_draws(words: Words, rows: int, draws: Iterable[tuple[int, Draw]]) -> None:
    """Fills words [DRAW_WORDS * rows] for the rows named; the others draw greedily."""
    words.fill(0)
    parts = words[: 6 * rows].reshape(6, rows)
    temperature, min_p, top_p = (parts[i].view(np.float32) for i in range(3))
    top_k, choice, index = parts[3:]
    seed = words[6 * rows :].view(np.uint64)
    top_p.fill(1.0)
    for row, how in draws:
        s = how.sampling
        if s.temperature <= 0:
            continue
        temperature[row], min_p[row], top_p[row] = s.temperature, s.min_p, s.top_p
        top_k[row], choice[row], index[row] = s.top_k, s.choice, how.index
        seed[row] = s.seed % 2**64


@dataclass(frozen=True, slots=True)
class DrawFields:
    """The words of some rows on the device; fp32, int32 and (`seed`) int64 tensors [rows]."""

    temperature: Tensor
    min_p: Tensor
    top_p: Tensor
    top_k: Tensor
    choice: Tensor
    index: Tensor
    seed: Tensor

    @staticmethod
    def of(words: Tensor) -> DrawFields:
        """Views of int32 words [DRAW_WORDS * rows] as `write_draws` made them."""
        rows = len(words) // DRAW_WORDS
        parts = words[: 6 * rows].view(6, rows)
        temperature, min_p, top_p = parts[:3].view(torch.float32)
        seed = words[6 * rows :].view(torch.int64)
        return DrawFields(temperature, min_p, top_p, parts[3], parts[4], parts[5], seed)


class DeviceDrawer:
    """Chooses tokens from logits on the device; what it is called with is `choose.Drawer`'s."""

    def __init__(self, kernels: Kernels, device: torch.device) -> None:
        self._kernels, self._device = kernels, device
        self._words = StepWords(device)

    @property
    def fused(self) -> bool:
        """Whether `draw` may be called: without it rows are drawn through the host."""
        return self._kernels.draw is not None

    def draw(self, logits: Tensor, how: DrawFields) -> Tensor:
        """Tokens int64 [rows] of logits fp32 [rows, vocab]. Nothing is read by the host."""
        assert self._kernels.draw is not None
        filters = how.min_p, how.top_k, how.top_p
        return self._kernels.draw(
            logits, how.temperature, how.seed, how.choice, how.index, *filters
        )

    def __call__(
        self, logits: Tensor, draws: Sequence[Draw], margins: bool
    ) -> tuple[list[int], list[float]]:
        if not self.fused:
            return draw(logits, draws, margins, self._kernels.gumbel_argmax)
        rows = len(draws)
        self._words.layout(draws=DRAW_WORDS * rows)
        write_draws(self._words.host("draws"), rows, enumerate(draws))
        self._words.upload()
        tokens: list[int] = self.draw(logits, DrawFields.of(self._words.device("draws"))).tolist()
        return tokens, margins_of(logits, draws) if margins else []
