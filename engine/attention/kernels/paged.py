"""Triton kernels of attention over paged KV; `engine.attention.mask.attention_ref` defines them.

A row's keys are cut at fixed positions: units of N keys, chunks of CHUNK units, counted from
position 0. Units are added up to chunks and chunks to the row, in order, by `_merge`, which rounds
in the same way wherever it runs. So a launch may give a program one unit, one chunk or all keys
(`_attend`) and leave the rest to `_finish` or `_combine` (`parts.py`): the bits of a row do not
depend on that, nor on the rows beside it. A unit that a row does not see changes nothing.

Query heads of one KV head are folded into rows, row-major: folded row f is head f % GROUP of row
f // GROUP. A tile has M folded rows whatever their number is.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from engine.attention.kernels.parts import _finish, _keep_part
from engine.attention.kernels.parts import _keys as _keys
from engine.attention.kernels.parts import _merge as _merge
from engine.attention.kernels.parts import _store as _store
from engine.kernels.triton.dependent import wait


@triton.jit
def _dot(a, b, IEEE: tl.constexpr):
    if IEEE:
        out = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        out = tl.dot(a, b)
    return out


@triton.jit(do_not_specialize=["items_at", "table_at", "pages_per_span", "window"])
def _attend(
    q, k_cache, v_cache, out, lse, sums, parts, arrived, words, items_at, table_at, pages_per_span,
    stride_q, stride_page, stride_token, scale, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, WHOLE: tl.constexpr, LSE: tl.constexpr,
    HALF: tl.constexpr, IEEE: tl.constexpr, FINISH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (KV heads, programs): each program takes items program, program + programs, ...

    q [rows, HEADS, D] with rows stride_q apart; caches [pages, PAGE, KV_HEADS, D]. An item is eight
    words: span, tile, first and last key, slot of the partial result or -1 where the item is all
    of its tile, start, rows and first row of the span. Partial results: sums [slots, KV_HEADS, M,
    2] are maxima and sums, parts [slots, KV_HEADS, M, BLOCK_D] the values. Without WHOLE no item
    has more than one chunk. scale contains log2(e). HALF: keys, values and probabilities take the
    16 bits of the queries; IEEE: products are those of fp32, never of fewer bits. FINISH > 0: no
    span has more folded rows than that, and `_finish` adds up instead of `_combine`.
    """
    wait(PDL)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(0)
    f = tl.arange(0, M)
    d = tl.arange(0, BLOCK_D)
    total = tl.load(words)
    for index in range(tl.program_id(1), total, tl.num_programs(1)):
        item = words + items_at + index * 8
        span = tl.load(item)
        tile = tl.load(item + 1)
        first_key = tl.load(item + 2)
        last_key = tl.load(item + 3)
        slot = tl.load(item + 4)
        start = tl.load(item + 5)
        rows = tl.load(item + 6)
        first_row = tl.load(item + 7)

        row = (tile * M + f) // GROUP
        query_head = head * GROUP + (tile * M + f) % GROUP
        real = row < rows
        low, high = _keys(start, rows, window, row, row, CAUSAL)
        high = tl.where(real, high, 0)
        last = tl.minimum((tile * M + M - 1) // GROUP, rows - 1)
        begin, end = _keys(start, rows, window, tile * M // GROUP, last, CAUSAL)
        begin = tl.maximum(begin, first_key)
        end = tl.minimum(end, last_key)

        at = (first_row + row)[:, None].to(tl.int64) * stride_q + query_head[:, None] * D
        query = tl.load(q + at + d[None, :], mask=real[:, None] & (d[None, :] < D), other=0.0)
        m = tl.full([M], float("-inf"), tl.float32)
        z = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, BLOCK_D], tl.float32)
        whole_m = tl.full([M], float("-inf"), tl.float32)
        whole_z = tl.zeros([M], tl.float32)
        whole_acc = tl.zeros([M, BLOCK_D], tl.float32)
        table = words + table_at + span * pages_per_span
        for unit in range(begin // N, tl.cdiv(end, N)):
            key = unit * N + tl.arange(0, N)
            inside = (key >= begin) & (key < end)
            page = tl.load(table + key // PAGE, mask=inside, other=0).to(tl.int64)
            place = page * stride_page + (key % PAGE) * stride_token + head * D
            place = place[:, None] + d[None, :]
            mask = inside[:, None] & (d[None, :] < D)
            k = tl.load(k_cache + place, mask=mask, other=0.0)
            v = tl.load(v_cache + place, mask=mask, other=0.0)
            if HALF:
                k = k.to(query.dtype)
                v = v.to(query.dtype)
            s = _dot(query, tl.trans(k), IEEE)
            seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
            s = tl.where(seen, s * scale, float("-inf"))
            unit_m = tl.max(s, 1)
            p = tl.exp2(s - tl.where(unit_m == float("-inf"), 0.0, unit_m)[:, None])
            unit_z = tl.sum(p, 1)
            if HALF:
                p = p.to(query.dtype)
            unit_acc = _dot(p, v, IEEE)
            m, z, acc = _merge(m, z, acc, unit_m, unit_z, unit_acc)
            if WHOLE:  # noqa: SIM102
                if (unit + 1) % CHUNK == 0:
                    whole_m, whole_z, whole_acc = _merge(whole_m, whole_z, whole_acc, m, z, acc)
                    m = tl.full([M], float("-inf"), tl.float32)
                    z = tl.zeros([M], tl.float32)
                    acc = tl.zeros([M, BLOCK_D], tl.float32)
        if WHOLE:
            m, z, acc = _merge(whole_m, whole_z, whole_acc, m, z, acc)

        if slot < 0:
            row_at = (first_row + row) * HEADS + query_head
            _store(out, lse, m, z, acc, row_at, real, D, LSE)
        else:
            slot_at = (slot.to(tl.int64) * KV_HEADS + head) * M + f
            keep = row < tl.where(begin < end, rows, 0)
            _keep_part(sums, parts, slot_at, keep, m, z, acc, BLOCK_D)
            if FINISH:
                _finish(
                    out, lse, sums, parts, arrived, slot, first_key, last_key - first_key, start,
                    rows, first_row, window, head, HEADS, KV_HEADS, D, BLOCK_D, M, N, CHUNK,
                    FINISH, CAUSAL, LSE,
                )  # fmt: skip
