"""What a step reads of the host's words, whatever their form."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from torch import Tensor

from engine.api import Item
from engine.choose import Chosen
from engine.draw_rows import DrawRows


class StepInputs(Protocol):
    """The words of a step, filled: `BlockWords` or `RaggedWords`.

    shape   what a CUDA graph of such steps depends on
    rows    how many the device runs, padding included
    used    how many of them there are up to the last that counts
    tokens  int64 [drawing rows] on the host, for the kernel that draws
    """

    @property
    def shape(self) -> Hashable: ...
    @property
    def rows(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def tokens(self) -> Tensor: ...

    def send(self) -> None:
        """The first part of the step itself: copies to the device what `fill` has not."""
        ...

    def device(self, name: str) -> Tensor:
        """ids, positions or slots: int32 [rows]."""
        ...

    def wanted(self) -> Tensor | None:
        """Rows whose logits are made, int32 [drawing rows]; None: of none."""
        ...

    def plan(self) -> object:
        """The attention's plan of whatever was filled last."""
        ...

    def draws(self, filtered: bool) -> DrawRows:
        """How the drawing rows draw; see `DrawRows.of`."""
        ...

    def matched(self, items: Sequence[Item]) -> list[Chosen]:
        """What `plain` items get of `tokens`, once the step is over."""
        ...

    def logits_of(self, items: Sequence[Item], logits: Tensor) -> Tensor:
        """The items' own of logits [drawing rows, vocabulary], item after item."""
        ...
