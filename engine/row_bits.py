"""bf16 rows as numpy carries them: it knows no bfloat16, so it sees uint16, bits unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

RowBits = np.ndarray[Any, np.dtype[np.uint16]]


def as_bits(rows: Tensor) -> RowBits:
    """Of bf16 rows in the host's memory, which is shared."""
    bits: RowBits = rows.contiguous().view(torch.uint16).numpy()
    return bits


def as_tensor(bits: RowBits) -> Tensor:
    """The bf16 tensor of the same memory."""
    return torch.from_numpy(bits).view(torch.bfloat16)
