"""Programmatic dependent launch (compute capability 9.0): a kernel is started while the one before
it still runs, fetches its weights into the L2 cache, and waits for the other's results only then.

Off until `use_dependent_launch`. A kernel that waits has waited, through the one before it, for all
before that; kernels without any of this run between them as ever. It changes no bits.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl

LINE = 64  # bf16 numbers of a cache line

_on = False


@functools.cache
def dependent_launch_available() -> bool:
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


def use_dependent_launch(on: bool) -> None:
    """For every launch from now on, where the device can; graphs keep what they were captured
    with.
    """
    global _on
    _on = on and dependent_launch_available()


def flags() -> dict[str, bool]:
    """The kernels' own flag, and the launcher's when it is set."""
    return {"PDL": True, "launch_pdl": True} if _on else {"PDL": False}


@triton.jit
def wait(PDL: tl.constexpr):
    """Lets the next kernel start, and waits for the one before; first thing in a kernel."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch(weight, row, K: tl.constexpr, LINES: tl.constexpr):
    """Asks for the first LINES lines (a power of two) of rows of bf16 weights [., K]."""
    column = tl.minimum(tl.arange(0, LINES) * 64, K - 1)
    at = (weight + row.to(tl.int64)[:, None] * K + column[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def fetched_lines(k: int) -> int:
    """How much of each row is worth asking for: all of a short one, the start of a long one."""
    return min(int(triton.next_power_of_2(-(-k // LINE))), 32)
