"""Drawing tokens on the device: argmax(logits / T + noise) over what the filters keep.

Two launches. The first cuts a row into segments and draws from each without filters; the second
takes the best of the segments and, where a row asks for filters, tests the token drawn and draws
again above it until one is kept, as `engine.sampling` does. All of it is fp32; sums run over one
row in a fixed order.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.draw_rows import DrawRows as DrawRows
from engine.kernels.triton.dependent import flags, wait
from engine.kernels.triton.filters import best_of_four, filtered, lowest_best

_SEGMENT = 1024
_BLOCK = 4096  # of a pass over a row that has filters


@triton.jit
def _settings(temperature, seed, choice, index, row, shift):
    return (
        tl.load(temperature + row),
        tl.load(seed + row).to(tl.int64),
        tl.load(choice + row).to(tl.int64),
        tl.load(index + row).to(tl.int64) + shift,
    )


@triton.jit(do_not_specialize=["shift"])
def _segments(
    logits, temperature, seed, choice, index, values, ids, tops, stride, V, shift,
    SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    segment = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    t, key, number, at = _settings(temperature, seed, choice, index, row, shift)
    c = segment * SEGMENT + 4 * tl.arange(0, SEGMENT // 4)
    low = float("-inf")
    value, id, highest = best_of_four(
        logits + row * stride, c, V, t, key, number, at, low, low
    )  # fmt: skip
    best, token = lowest_best(value, id)
    place = row * SEGMENTS + segment
    tl.store(values + place, best)
    tl.store(ids + place, token)
    tl.store(tops + place, tl.max(highest, 0))


@triton.jit(do_not_specialize=["shift"])
def _choose(
    logits, temperature, seed, choice, index, min_p, top_k, top_p, values, ids, tops, out, stride,
    out_stride, V, shift, SEGMENTS: tl.constexpr, LANES: tl.constexpr, FILTER: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    inside = lane < SEGMENTS
    place = row * SEGMENTS + lane
    value = tl.load(values + place, mask=inside, other=float("-inf"))
    _, token = lowest_best(value, tl.load(ids + place, mask=inside, other=0x7FFFFFFF))
    if FILTER:
        t, key, number, at = _settings(temperature, seed, choice, index, row, shift)
        least = tl.load(min_p + row)
        most = tl.load(top_k + row).to(tl.int32)
        share = tl.load(top_p + row)
        if (t > 0) & ((most > 0) | (share < 1.0) | (least > 0)):
            best = tl.max(tl.load(tops + place, mask=inside, other=float("-inf")), 0)
            token = filtered(
                logits + row * stride, V, token, best, t, key, number, at, least, most, share, BLOCK
            )  # fmt: skip
    tl.store(out + row * out_stride, token.to(tl.int64))


def draw(
    logits: Tensor,
    rows: DrawRows,
    vocab: int | None = None,
    shift: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Ids int64 [rows] of logits fp32 [rows, columns]; columns from `vocab` on are padding.

    Ties go to the lowest id; T = 0 skips noise and filters. `shift` is added to every index.
    `out` int64 [rows], which may be a column of a matrix, gets the ids when given.
    """
    count, columns = logits.shape
    vocab = columns if vocab is None else vocab
    assert logits.stride(1) == 1 and 0 < vocab <= columns
    device = logits.device
    if out is None:
        out = torch.empty(count, dtype=torch.int64, device=device)
    if not count:
        return out
    segments = triton.cdiv(vocab, _SEGMENT)
    # Both from a multiple of 16 bytes on, as all arrays of the kernels are.
    values, tops = torch.empty(2, -(-count * segments // 4) * 4, device=device)
    ids = torch.empty(count, segments, dtype=torch.int32, device=device)
    keys = rows.temperature, rows.seed, rows.choice, rows.index
    _segments[(segments, count)](
        logits, *keys, values, ids, tops, logits.stride(0), vocab, shift, segments, _SEGMENT,
        num_warps=4, **flags(count),
    )  # fmt: skip
    filters = rows.min_p, rows.top_k, rows.top_p
    some = rows.min_p is not None
    _choose[(count,)](
        logits, *keys, *(filters if some else keys[:3]), values, ids, tops, out, logits.stride(0),
        out.stride(0), vocab, shift, segments, triton.next_power_of_2(segments), some, _BLOCK,
        num_warps=16 if some else 1, **flags(count),
    )  # fmt: skip
    return out
