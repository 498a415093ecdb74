"""Tap rows on their way from the device to the host, beside the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.row_bits import RowBits, as_bits


def columns_of(
    rows: Tensor, taps: tuple[int, ...], wanted: Sequence[int], hidden_size: int
) -> Tensor:
    """Of rows [n, len(taps) * hidden_size] those of the `wanted` layers, in their order."""
    if taps == tuple(wanted):
        return rows
    starts = [taps.index(tap) * hidden_size for tap in wanted]
    return torch.cat([rows[:, at : at + hidden_size] for at in starts], dim=1)


class Copied:
    """The event behind a copy to the host."""

    def __init__(self) -> None:
        self.event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record()
        # Whether somebody has waited for it.
        self.over = False

    def wait(self) -> None:
        if not self.over:
            self.event.synchronize()
            self.over = True


@dataclass(frozen=True, slots=True)
class LateRows:
    """Rows of a step. `arrived`: behind their copy to the host, None where they are there already
    (or stay on the device, for somebody who computes with them)."""

    rows: Tensor
    arrived: Copied | None = None
    # The same memory, where it is the host's: made while the device works.
    _bits: RowBits | None = None

    def get(self) -> Tensor:
        """The rows; waits for them. Any thread may call it."""
        if self.arrived is not None:
            self.arrived.wait()
        return self.rows

    def bits(self, first: int, end: int) -> RowBits:
        """Rows [first, end) as bf16 in the host's memory; waits for them. Any thread may call
        it."""
        rows = self.get()
        if self._bits is not None:
            return self._bits[first:end]
        return as_bits(rows[first:end].to("cpu", torch.bfloat16))


@dataclass(frozen=True, slots=True)
class StepRows:
    """What a step gives outside: outputs of the tap layers [rows, len(taps) * hidden], and those of
    a draft's projection [rows, width]. None: nobody asked."""

    taps: LateRows | None = None
    projected: LateRows | None = None

    @classmethod
    def here(cls, tap_rows: Tensor | None, project: Callable[[Tensor], Tensor] | None) -> StepRows:
        """Of a step on the CPU."""
        if tap_rows is None:
            return cls()
        projected = None if project is None else LateRows(project(tap_rows))
        return cls(LateRows(tap_rows), projected)


class TapExport:
    """Copies rows to page-locked memory on a stream of its own, so that nobody waits who does not
    read them. On the CPU the copy is made at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        self._copied: Copied | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def hold(self) -> None:
        """What is launched from here on may write again where rows were taken from."""
        copied, self._copied = self._copied, None
        if copied is not None and not copied.over:  # mostly the rows were sent long ago
            torch.cuda.current_stream().wait_event(copied.event)

    def take(self, rows: Tensor | None) -> LateRows | None:
        """A bf16 copy of what `rows` holds behind everything launched so far."""
        if rows is None:
            return None
        if self._stream is None:
            return LateRows(rows.to(torch.bfloat16, copy=True))
        out = torch.empty(rows.shape, dtype=torch.bfloat16, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            out.copy_(rows, non_blocking=True)
            rows.record_stream(self._stream)
            self._copied = Copied()
        return LateRows(out, self._copied, as_bits(out))
