"""How rows draw: on the device as tensors, on the host as words of the step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.api import Sampling
from engine.sampling import Draw
from engine.step_words import Words

# temperature, min_p, top_p (fp32), top_k, choice, index, seed (64 bits): one array after another,
# each from a multiple of 16 bytes on: a kernel is compiled for where its arrays begin.
_WORDS = 8
_ALIGNED_ROWS = 4
_MOST = 2**31 - 1  # of a word with a sign; no vocabulary is larger


def draw_words(rows: int) -> int:
    """Words that say how so many rows draw."""
    return _WORDS * _room(rows)


def _room(rows: int) -> int:
    return -(-rows // _ALIGNED_ROWS) * _ALIGNED_ROWS


@dataclass(frozen=True, slots=True)
class DrawRows:
    """How to draw each row: temperature fp32 [rows]; seed (64 bits), choice and index int64 or
    int32 [rows]. Filters min_p, top_p fp32 and top_k int [rows]: all, or None where no row has any.
    """

    temperature: Tensor
    seed: Tensor
    choice: Tensor
    index: Tensor
    min_p: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None

    @staticmethod
    def of(words: Tensor, rows: int, filtered: bool = True) -> DrawRows:
        """Views of int32 words [draw_words(rows)] as `DrawWords` fills them; without `filtered`
        the rows' filters are left out, for rows that have none."""
        room = _room(rows)
        parts = words[: 6 * room].view(6, room)[:, :rows]
        temperature, min_p, top_p = parts[:3].view(torch.float32)
        seed = words[6 * room :].view(torch.int64)[:rows]
        filters = (min_p, parts[3], top_p) if filtered else (None, None, None)
        return DrawRows(temperature, seed, parts[4], parts[5], *filters)


class DrawWords:
    """The host's side of `DrawRows.of`: rows draw greedily until they are written."""

    def __init__(self, words: Words, rows: int) -> None:
        """`words` [draw_words(rows)] may hold anything until `clear`."""
        self._words, self._greedy = words, False
        # What `write_blocks` wrote last.
        self._blocks: list[Sampling] | None = None
        room = _room(rows)
        parts = words[: 6 * room].reshape(6, room)[:, :rows]
        self._temperature, self._min_p, self._top_p = (parts[i].view(np.float32) for i in range(3))
        self._top_k, self._index = parts[3], parts[5]
        # The noise takes its low 32 bits, whatever sign the kernel gives them.
        self._choice = parts[4].view(np.uint32)
        self._seed = words[6 * room :].view(np.uint64)[:rows]

    def clear(self) -> None:
        if not self._greedy:
            self._words.fill(0)
            self._top_p.fill(1.0)
            self._greedy = True

    def write(self, first: int, count: int, sampling: Sampling, index: int) -> None:
        """Rows first .. first + count - 1 draw the tokens at positions index, index + 1, ..."""
        s = sampling
        if s.temperature <= 0:
            return
        self._greedy, rows = False, slice(first, first + count)
        self._temperature[rows], self._min_p[rows], self._top_p[rows] = (
            s.temperature,
            s.min_p,
            s.top_p,
        )
        self._top_k[rows] = min(s.top_k, _MOST)
        self._choice[rows], self._seed[rows] = s.choice % 2**32, s.seed % 2**64
        self._index[rows] = range(index, index + count)

    def write_blocks(self, blocks: list[Sampling], width: int, positions: Words) -> None:
        """All rows: those of block after block of `width`, each the token behind its own of the
        `positions` [rows]. Most steps have the blocks of the step before: only positions differ."""
        if blocks != self._blocks:
            self.clear()
            for block, sampling in enumerate(blocks):
                self.write(block * width, width, sampling, 0)
            self._blocks = blocks
        if not self._greedy:
            np.add(positions, 1, out=self._index)


def write_draws(words: Words, rows: int, draws: Iterable[tuple[int, Draw]]) -> None:
    """Fills words [draw_words(rows)] for the rows named; the others draw greedily."""
    written = DrawWords(words, rows)
    written.clear()
    for row, how in draws:
        written.write(row, 1, how.sampling, how.index)
