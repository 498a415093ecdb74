"""Triton kernels of attention over paged KV; `engine.attention.mask.attention_ref` defines them.

A row's keys are cut at fixed positions: units of N keys, chunks of CHUNK units, each chunk of four
bundles, counted from position 0. Units are added up to bundles, bundles to chunks and chunks to the
row, in order, by `_merge`, which rounds in the same way wherever it runs. So a launch may give a
program one unit, one bundle, one chunk or all keys (`_attend`) and leave the rest to `_finish` or
`_combine` (`combine.py`): the bits of a row do not depend on that, nor on the rows beside it. A
unit that a row does not see changes nothing.

Query heads of one KV head are folded into rows, row-major: folded row f is head f % GROUP of row
f // GROUP. A tile has M folded rows whatever their number is; fewer than others have only where
that was found to change no bit (`few_rows.py`).
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from engine.attention.kernels.combine import _finish
from engine.attention.kernels.parts import _keep_part, _nothing
from engine.attention.kernels.parts import _keys as _keys
from engine.attention.kernels.parts import _merge as _merge
from engine.attention.kernels.parts import _store as _store
from engine.kernels.triton.dependent import ask, wait


@triton.jit
def _dot(a, b, IEEE: tl.constexpr):
    if IEEE:
        out = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        out = tl.dot(a, b)
    return out


@triton.jit
def _item(item, some):
    """The eight words of an item, zeros where there is none."""
    return (
        tl.load(item, mask=some, other=0), tl.load(item + 1, mask=some, other=0),
        tl.load(item + 2, mask=some, other=0), tl.load(item + 3, mask=some, other=0),
        tl.load(item + 4, mask=some, other=0), tl.load(item + 5, mask=some, other=0),
        tl.load(item + 6, mask=some, other=0), tl.load(item + 7, mask=some, other=0),
    )  # fmt: skip


@triton.jit
def _places(table, unit, last_page, N: tl.constexpr, PAGE: tl.constexpr):
    """Page ids of the keys of a unit, int64 [N], and their numbers within those pages.

    Keys behind the last page are looked for in it, so that no load needs a mask. Where a unit has
    whole pages all but the ids is the same for every unit, and is worked out once.
    """
    key = tl.arange(0, N)
    if N % PAGE == 0:
        page = unit * (N // PAGE) + key // PAGE
        within = key % PAGE
    elif PAGE % N == 0:
        page = unit // (PAGE // N) + tl.zeros_like(key)
        within = unit % (PAGE // N) * N + key
    else:
        page = (unit * N + key) // PAGE
        within = (unit * N + key) % PAGE
    return tl.load(table + tl.minimum(page, last_page)).to(tl.int64), within


@triton.jit
def _bounds(
    tile, start, rows, first_key, last_key, window,
    M: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Keys of an item that rows of its tile see."""
    last = tl.minimum((tile * M + M - 1) // GROUP, rows - 1)
    begin, end = _keys(start, rows, window, tile * M // GROUP, last, CAUSAL)
    return tl.maximum(begin, first_key), tl.minimum(end, last_key)


@triton.jit
def _fetch_rows(cache, place, D: tl.constexpr):
    """Asks for rows of D values, the first lines of which are at cache + place."""
    BITS: tl.constexpr = D * cache.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = 1 if BITS <= 1024 else 2 if BITS <= 2048 else 4 if BITS <= 4096 else 8
    line = tl.arange(0, LINES)
    ask(cache + place[:, None] + (line * (D // LINES))[None, :])


@triton.jit(do_not_specialize=["items_at", "table_at", "pages_per_span", "window"])
def _attend(
    q, k_cache, v_cache, out, lse, sums, parts, arrived, words, items_at, table_at, pages_per_span,
    stride_q, scale, window,
    STRIDE_PAGE: tl.constexpr, STRIDE_TOKEN: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, WHOLE: tl.constexpr, LSE: tl.constexpr,
    WINDOWED: tl.constexpr, HALF: tl.constexpr, IEEE: tl.constexpr, FINISH: tl.constexpr,
    PDL: tl.constexpr,
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
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BUNDLE: tl.constexpr = CHUNK // 4
    head = tl.program_id(0)
    f = tl.arange(0, M)
    d = tl.arange(0, BLOCK_D)
    wide = d[None, :] < D
    own_k = k_cache + head * D + d[None, :]
    own_v = v_cache + head * D + d[None, :]
    total = tl.load(words)
    items = words + items_at
    index = tl.program_id(1)
    # The first item is fetched together with `total`, each one while that before it is worked on.
    span, tile, first_key, last_key, slot, start, rows, first_row = _item(items + index * 8, True)
    if PDL:
        begin, end = _bounds(tile, start, rows, first_key, last_key, window, M, GROUP, CAUSAL)
        if (begin < end) & (index < total):
            table = words + table_at + span * pages_per_span
            page, within = _places(table, begin // N, (end - 1) // PAGE, N, PAGE)
            place = page * STRIDE_PAGE + within * STRIDE_TOKEN + head * D
            _fetch_rows(k_cache, place, D)
            _fetch_rows(v_cache, place, D)
    wait(PDL)
    while index < total:
        index += tl.num_programs(1)
        following = _item(items + index * 8, index < total)

        row = (tile * M + f) // GROUP
        query_head = head * GROUP + (tile * M + f) % GROUP
        real = row < rows
        low, high = _keys(start, rows, window, row, row, CAUSAL)
        high = tl.where(real, high, 0)
        begin, end = _bounds(tile, start, rows, first_key, last_key, window, M, GROUP, CAUSAL)

        at = (first_row + row)[:, None].to(tl.int64) * stride_q + query_head[:, None] * D
        query = tl.load(q + at + d[None, :], mask=real[:, None] & (d[None, :] < D), other=0.0)
        m, z, acc = _nothing(M, BLOCK_D)
        chunk_m, chunk_z, chunk_acc = _nothing(M, BLOCK_D)
        whole_m, whole_z, whole_acc = _nothing(M, BLOCK_D)
        table = words + table_at + span * pages_per_span
        for unit in range(begin // N, tl.cdiv(end, N)):
            page, within = _places(table, unit, (end - 1) // PAGE, N, PAGE)
            place = (page * STRIDE_PAGE + within * STRIDE_TOKEN)[:, None]
            if D == BLOCK_D:
                k = tl.load(own_k + place)
            else:
                k = tl.load(own_k + place, mask=wide, other=0.0)
            written = tl.arange(0, N) < end - unit * N
            v = tl.load(own_v + place, mask=written[:, None] & wide, other=0.0)
            if HALF:
                k = k.to(query.dtype)
                v = v.to(query.dtype)
            s = _dot(query, tl.trans(k), IEEE)
            key = unit * N + tl.arange(0, N)
            seen = key[None, :] < high[:, None]
            if WINDOWED:
                seen &= key[None, :] >= low[:, None]
            s = tl.where(seen, s, float("-inf"))
            unit_m = tl.max(s, 1) * scale
            top = tl.where(unit_m == float("-inf"), 0.0, unit_m)
            p = tl.exp2(tl.fma(s, scale, -top[:, None]))
            unit_z = tl.sum(p, 1)
            if HALF:
                p = p.to(query.dtype)
            unit_acc = _dot(p, v, IEEE)
            m, z, acc = _merge(m, z, acc, unit_m, unit_z, unit_acc)
            if (unit + 1) % BUNDLE == 0:
                chunk_m, chunk_z, chunk_acc = _merge(chunk_m, chunk_z, chunk_acc, m, z, acc)
                m, z, acc = _nothing(M, BLOCK_D)
            if WHOLE:  # noqa: SIM102
                if (unit + 1) % CHUNK == 0:
                    whole_m, whole_z, whole_acc = _merge(
                        whole_m, whole_z, whole_acc, chunk_m, chunk_z, chunk_acc
                    )
                    chunk_m, chunk_z, chunk_acc = _nothing(M, BLOCK_D)
        m, z, acc = _merge(chunk_m, chunk_z, chunk_acc, m, z, acc)
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
        span, tile, first_key, last_key, slot, start, rows, first_row = following
