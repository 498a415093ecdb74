"""Tap rows as they leave the engine."""

from __future__ import annotations

import numpy as np
import torch

from engine.row_bits import as_bits, as_tensor
from engine.tap_export import LateRows, TapExport


def test_bits_are_those_of_bf16_and_no_more_rows_than_asked_for() -> None:
    """fp32 rows of scored prompts too: an item's rows are converted, and kept, alone."""
    rows = torch.randn(100, 6)
    for late in (LateRows(rows), TapExport(torch.device("cpu")).take(rows)):
        assert late is not None
        bits = late.bits(10, 13)
        assert bits.dtype == np.uint16 and bits.shape == (3, 6)
        assert torch.equal(as_tensor(bits), rows[10:13].bfloat16())
    assert LateRows(rows).bits(10, 13).base.numel() == 3 * 6  # type: ignore[union-attr]


def test_bits_share_the_memory_of_their_rows() -> None:
    rows = torch.randn(4, 3).bfloat16()
    bits = as_bits(rows)
    bits[2, 1] = 0
    assert rows[2, 1] == 0
    assert torch.equal(as_tensor(bits), rows)
    assert torch.equal(as_tensor(as_bits(rows.t())), rows.t())
