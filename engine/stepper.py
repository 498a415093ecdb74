"""What one forward on a device gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.batch import Placed
from engine.choose import Chosen
from engine.tap_export import LateRows


@dataclass(frozen=True, slots=True)
class Ran:
    """Of the items of a step, in their order.

    tap_rows  outputs of the tap layers [rows, len(taps) * hidden]: bf16 on their way to the host,
              or as they were computed where prompts are scored
    """

    placed: Sequence[Placed]
    chosen: Sequence[Chosen]
    tap_rows: LateRows | None
