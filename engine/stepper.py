"""What one forward on a device gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.batch import Placed
from engine.choose import Chosen


@dataclass(frozen=True, slots=True)
class Ran:
    """Of the items of a step, in their order.

    tap_rows  outputs of the tap layers [rows, len(taps) * hidden]: bf16 in the host's memory, or as
              they were computed where prompts are scored
    """

    placed: Sequence[Placed]
    chosen: Sequence[Chosen]
    tap_rows: Tensor | None
