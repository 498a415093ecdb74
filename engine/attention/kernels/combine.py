"""Adding up partial results of attention: units of keys to bundles, bundles to chunks, chunks to
rows, always in the order of the keys and by `_merge`, whoever does it. See `paged.py`.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from engine.attention.kernels.parts import (
    _keep_part,
    _keys,
    _merge,
    _merge_parts,
    _nothing,
    _store,
)
from engine.kernels.triton.dependent import wait


@triton.jit
def _add_up(
    sums, parts, base, step, first, stop, row, rows,
    R: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """The state [R, BLOCK_D] of a row's parts first .. stop - 1, `step` apart from `base`, the
    place of part 0: chunks (FOLD 1) or bundles (FOLD 4)."""
    # Where parts are small more of them are asked for before the first is needed; four turns are
    # no quicker, and take half a minute to compile.
    TURNS: tl.constexpr = 2 if R * BLOCK_D <= 512 else 1
    m, z, acc = _nothing(R, BLOCK_D)
    for begun in range(first // AT_ONCE * AT_ONCE, stop, AT_ONCE * TURNS):
        for turn in tl.static_range(TURNS):
            number = begun + turn * AT_ONCE
            m, z, acc = _merge_parts(
                m, z, acc, sums, parts, base + number * step, step, number, first, stop, row, rows,
                BLOCK_D, AT_ONCE, FOLD,
            )  # fmt: skip
    return m, z, acc


@triton.jit
def _finish(
    out, lse, sums, parts, arrived, slot, first_key, size, start, rows, first_row, window, head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr,
    CAUSAL: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Behind a part of `size` keys of a span of at most R folded rows: where parts are units, who
    comes last to a chunk adds those up; who comes last to the row adds up its chunks, or its
    bundles. arrived [slots, KV_HEADS, 2] counts both and is zeros before and after."""
    AT_ONCE: tl.constexpr = 8 if CHUNK % 8 == 0 and R * BLOCK_D <= 1024 else 4
    GROUP: tl.constexpr = HEADS // KV_HEADS
    f = tl.arange(0, R)
    row = f // GROUP
    begin, end = _keys(start, rows, window, 0, rows - 1, CAUSAL)
    units = size == N
    part = first_key // size
    base = slot.to(tl.int64) - part
    row_place = (first_row + row) * HEADS + head * GROUP + f % GROUP
    counter = arrived + (base * KV_HEADS + head) * 2
    # Parts of the row as its last step finds them: a chunk's sum is where its first unit was.
    per = tl.where(units, CHUNK, 1)
    keys = size * per
    count = tl.cdiv(start + rows, keys)

    tl.debug_barrier()  # every thread's part is written before one of them counts
    complete = size > N
    if units:
        chunk = part // CHUNK
        some = tl.minimum(CHUNK, tl.cdiv(start + rows, N) - chunk * CHUNK)
        chunk_counter = counter + chunk * (CHUNK * KV_HEADS * 2)
        before = tl.atomic_add(chunk_counter, 1)
        complete = before == some - 1
        if complete:
            tl.store(chunk_counter, 0)
            m, z, acc = _nothing(R, BLOCK_D)
            first, stop = begin // N, tl.cdiv(end, N)
            for unit in range(chunk * CHUNK, chunk * CHUNK + some, AT_ONCE):
                at = ((base + unit) * KV_HEADS + head) * M + f
                m, z, acc = _merge_parts(
                    m, z, acc, sums, parts, at, KV_HEADS * M, unit, first, stop, row, rows,
                    BLOCK_D, AT_ONCE, CHUNK // 4,
                )  # fmt: skip
            if count == 1:
                _store(out, lse, m, z, acc, row_place, row < rows, D, LSE)
            else:
                tl.debug_barrier()  # read by all threads before it is written over
                to = ((base + chunk * CHUNK) * KV_HEADS + head) * M + f
                _keep_part(sums, parts, to, row < rows, m, z, acc, BLOCK_D)
                tl.debug_barrier()
    if complete & (count > 1):
        before = tl.atomic_add(counter + 1, 1)
        if before == count - 1:
            tl.store(counter + 1, 0)
            at = (base * KV_HEADS + head) * M + f
            first, stop = begin // keys, tl.cdiv(end, keys)
            if keys == CHUNK * N:
                m, z, acc = _add_up(
                    sums, parts, at, KV_HEADS * M * per, first, stop, row, rows, R, BLOCK_D,
                    AT_ONCE, 1,
                )  # fmt: skip
            else:
                m, z, acc = _add_up(
                    sums, parts, at, KV_HEADS * M, first, stop, row, rows, R, BLOCK_D, AT_ONCE, 4
                )
            _store(out, lse, m, z, acc, row_place, row < rows, D, LSE)


@triton.jit
def _tile(record, some):
    """The words of a tile to combine, those of an empty one where there is none."""
    return (
        tl.load(record, mask=some, other=0).to(tl.int64),
        tl.load(record + 1, mask=some, other=0), tl.load(record + 2, mask=some, other=1),
        tl.load(record + 3, mask=some, other=0), tl.load(record + 4, mask=some, other=0),
        tl.load(record + 5, mask=some, other=0),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tiles_end", "window"])
def _combine(
    out, lse, sums, parts, words, tiles_end, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr,
    CAUSAL: tl.constexpr, LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds up the partial results of tiles. Grid (KV heads, M / R, programs).

    A tile is eight words, tile j ending where tile j - 1 begins, the first at tiles_end: first
    slot, tile, slots a chunk, start, rows, first row of the span.
    """
    AT_ONCE: tl.constexpr = 8 if CHUNK % 8 == 0 and R * BLOCK_D <= 1024 else 4
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head = tl.program_id(0)
    f = tl.program_id(1) * R + tl.arange(0, R)
    total = tl.load(words + 1)
    index = tl.program_id(2)
    record = words + tiles_end - (index + 1) * 8
    base, tile, per, start, rows, first_row = _tile(record, index < total)
    wait(PDL)
    while index < total:
        index += tl.num_programs(2)
        record = words + tiles_end - (index + 1) * 8
        following = _tile(record, index < total)

        row = (tile * M + f) // GROUP
        real = row < rows
        last = tl.minimum((tile * M + M - 1) // GROUP, rows - 1)
        begin, end = _keys(start, rows, window, tile * M // GROUP, last, CAUSAL)
        keys = CHUNK * N // per
        # Programs of rows that the tile does not have run no iteration.
        some = (tile * M + tl.program_id(1) * R) < rows * GROUP
        first = begin // keys
        stop = tl.where(some, tl.cdiv(end, keys), 0)

        step = KV_HEADS * M
        place = (base * KV_HEADS + head) * M + f
        if per == 1:
            m, z, acc = _add_up(
                sums, parts, place, step, first, stop, row, rows, R, BLOCK_D, AT_ONCE, 1
            )
        elif per == 4:
            m, z, acc = _add_up(
                sums, parts, place, step, first, stop, row, rows, R, BLOCK_D, AT_ONCE, 4
            )
        else:
            m, z, acc = _nothing(R, BLOCK_D)
            whole_m, whole_z, whole_acc = _nothing(R, BLOCK_D)
            for slot in range(first // AT_ONCE * AT_ONCE, stop, AT_ONCE):
                m, z, acc = _merge_parts(
                    m, z, acc, sums, parts, place + slot * step, step, slot, first, stop, row,
                    rows, BLOCK_D, AT_ONCE, CHUNK // 4,
                )  # fmt: skip
                if (slot + AT_ONCE) % CHUNK == 0:
                    whole_m, whole_z, whole_acc = _merge(whole_m, whole_z, whole_acc, m, z, acc)
                    m, z, acc = _nothing(R, BLOCK_D)
            m, z, acc = _merge(whole_m, whole_z, whole_acc, m, z, acc)
        query_head = head * GROUP + (tile * M + f) % GROUP
        place = (first_row + row) * HEADS + query_head
        _store(out, lse, m, z, acc, place, real, D, LSE)
        base, tile, per, start, rows, first_row = following
