"""Programmatic dependent launch (compute capability 9.0): a kernel is started while the one before
it still runs, reads what no kernel of the step writes (the host's words, tables, weights, some of
them into the L2 cache only), and waits for the other's results only then.

A step of few rows is a chain of kernels of a few microseconds, and is up to a sixth shorter so. One
of more than 64 rows is not: its kernels fill the device, and what starts early is in their way. A
kernel that waits has waited, through the one before it, for all before that; kernels without any of
this run between them as ever. It changes no bits.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LINE = 64  # bf16 numbers of a cache line
_FEW_ROWS = 64
_FETCHED_LINES, _FETCHED_SIZE = 32, 4 << 20

_wanted = True


@functools.cache
def dependent_launch_available() -> bool:
    if INTERPRETED or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


def use_dependent_launch(on: bool) -> None:
    """On unless this says otherwise, for all launches from now on; graphs keep what they were
    captured with."""
    global _wanted
    _wanted = on


def flags(rows: int) -> dict[str, bool]:
    """Of a launch over so many rows: the kernel's own flag, and the launcher's where it is set."""
    if not _wanted or rows > _FEW_ROWS:
        return {"PDL": False}
    if INTERPRETED:  # what is read before waiting is read there too
        return {"PDL": True}
    return {"PDL": True, "launch_pdl": True} if dependent_launch_available() else {"PDL": False}


@triton.jit
def wait(PDL: tl.constexpr):
    """Waits for the kernel before this one, and only then lets the next one start: two at a time
    are enough to hide a launch, and more would take the memory's time from the one at work."""
    if PDL and not INTERPRETED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def ask(at):
    """Asks for the cache lines of pointers."""
    if INTERPRETED:
        tl.load(at)
    else:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [at.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def fetch(weight, row, K: tl.constexpr, LINES: tl.constexpr):
    """Asks for rows of bf16 weights [., K]: the first LINES lines of each, a power of two or 0.
    Programs of the same columns (axis 0) leave it to the first."""
    if LINES:  # noqa: SIM102
        if tl.program_id(0) == 0:
            column = tl.minimum(tl.arange(0, LINES) * 64, K - 1)
            ask(weight + row.to(tl.int64)[:, None] * K + column[None, :])


def fetched_lines(n: int, k: int) -> int:
    """How much of each row of a weight [n, k] is worth asking for: all of it where the weight is
    small, nothing where it is not, since a long stream of weights needs no start."""
    lines = int(triton.next_power_of_2(-(-k // LINE)))
    return lines if lines <= _FETCHED_LINES and n * k <= _FETCHED_SIZE else 0
