"""What one forward on a device gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.batch import Placed
from engine.choose import Chosen
from engine.tap_export import StepRows


@dataclass(frozen=True, slots=True)
class Ran:
    """Of the items of a step, in their order.

    rows     bf16 on their way to the host, or as they were computed where prompts are scored
    written  KV groups of a co-located drafter whose context the step wrote
    """

    placed: Sequence[Placed]
    chosen: Sequence[Chosen]
    rows: StepRows
    written: tuple[str, ...] = ()
