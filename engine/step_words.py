"""The integers of one step in one piece of memory, so that they reach the device in one copy.

Everything that a step needs from the host (ids, positions, slots, page tables, how to draw) is
written as int32 words into page-locked memory and copied at once. The addresses on the device stay
the same while the layout does, which is what a CUDA graph reads them by.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

Words = np.ndarray[Any, np.dtype[np.int32]]

# Fields begin at multiples of 16 bytes: kernels load them in vectors, and int64 fields fit.
_ALIGNMENT_WORDS = 4
_SMALLEST = 4096


class StepWords:
    """Named fields of int32 words, on the host and on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts: dict[str, int] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._copied: Any = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._allocate(_SMALLEST)

    def _allocate(self, words: int) -> None:
        pinned = self._device.type == "cuda"
        self._host = torch.zeros(words, dtype=torch.int32, pin_memory=pinned)
        self._words: Words = self._host.numpy()
        self._on_device = torch.zeros(words, dtype=torch.int32, device=self._device)
        self._to, self._from = self._on_device[:0], self._host[:0]

    def layout(self, **counts: int) -> None:
        """Lays the fields out, `counts` words each. What they hold is anything. Waits until the
        last `upload` has read the host's side."""
        if self._copied is not None:
            self._copied.synchronize()
        if counts == self._counts:
            return
        self._places, at = {}, 0
        for name, count in counts.items():
            self._places[name] = at, count
            at += -(-count // _ALIGNMENT_WORDS) * _ALIGNMENT_WORDS
        self._counts = counts
        if at > self._words.size:
            self._allocate(1 << (at - 1).bit_length())
        self._to, self._from = self._on_device[:at], self._host[:at]

    def host(self, name: str) -> Words:
        """The field to be written; `upload` takes it along."""
        first, count = self._places[name]
        return self._words[first : first + count]

    def device(self, name: str) -> Tensor:
        """The field as int32 on the device."""
        first, count = self._places[name]
        return self._on_device[first : first + count]

    def upload(self) -> None:
        """Copies every field. The host's side may be written again behind the next `layout`, or
        once anything launched later is over."""
        self.copy()
        if self._copied is not None:
            self._copied.record()

    def copy(self) -> None:
        """The same as a part of a CUDA graph: each call that the host makes in front of a replay
        takes it longer than all of this takes the device. No `layout` waits for it: the host's
        side may be written again once what is launched behind it is over."""
        self._to.copy_(self._from, non_blocking=True)
