"""Matching proposals with what the target drew, on the device: one small tensor for the host."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.dependent import flags, wait


@triton.jit
def _accept(
    drawn, given, first, count, out, WIDTH: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait(PDL)
    item = tl.program_id(0).to(tl.int64)
    row = tl.load(first + item).to(tl.int64)
    rows = tl.load(count + item).to(tl.int32)
    lane = tl.arange(0, LANES)
    token = tl.load(drawn + row + lane, mask=lane < rows, other=-1).to(tl.int64)
    draft = lane < rows - 1  # the draft token of a lane was given to the row behind
    wanted = tl.load(given + row + 1 + lane, mask=draft, other=-1).to(tl.int64)
    differs = draft & (token != wanted)
    accepted = tl.min(tl.where(differs, lane, tl.maximum(rows - 1, 0)), 0)
    place = out + item * (WIDTH + 1)
    tl.store(place, accepted.to(tl.int64))
    emitted = tl.where((lane <= accepted) & (lane < rows), token, -1)
    tl.store(place + 1 + lane, emitted, mask=lane < WIDTH)


def accept(drawn: Tensor, given: Tensor, first: Tensor, count: Tensor, width: int) -> Tensor:
    """int64 [items, 1 + width]: how many draft tokens are accepted, then what is emitted, then -1.

    drawn and given [rows], both int: what each row drew, and the token that it took for granted.
    Item i has the rows first[i] .. first[i] + count[i] - 1, count[i] <= width: its anchor's, then
    those of its drafts. An item without rows gets 0 and nothing.
    """
    items = first.shape[0]
    out = torch.empty(items, 1 + width, dtype=torch.int64, device=drawn.device)
    if items:
        lanes = triton.next_power_of_2(width)
        _accept[(items,)](
            drawn, given, first, count, out, width, lanes, num_warps=1, **flags(len(drawn))
        )
    return out
