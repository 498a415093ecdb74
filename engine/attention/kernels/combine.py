"""Adding up partial results of attention: units of keys to chunks, chunks to rows, always in the
order of the keys and by `_merge`, whoever does it. See `paged.py`.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from engine.attention.kernels.parts import _keep_part, _keys, _merge, _merge_parts, _store
from engine.kernels.triton.dependent import wait


@triton.jit
def _finish(
    out, lse, sums, parts, arrived, slot, first_key, size, start, rows, first_row, window, head,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr,
    CAUSAL: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Behind a part of `size` keys of a span of at most R folded rows: who comes last to a chunk
    adds its units up, who comes last to the row its chunks. arrived [slots, KV_HEADS, 2] counts
    both and is zeros before and after."""
    AT_ONCE: tl.constexpr = 8 if CHUNK % 8 == 0 and R * BLOCK_D <= 1024 else 4
    # Where parts are small more of them are asked for before the first is needed.
    TURNS: tl.constexpr = 4 if R * BLOCK_D <= 256 else 2 if R * BLOCK_D <= 512 else 1
    GROUP: tl.constexpr = HEADS // KV_HEADS
    f = tl.arange(0, R)
    row = f // GROUP
    begin, end = _keys(start, rows, window, 0, rows - 1, CAUSAL)
    per = tl.where(size == N, CHUNK, 1)
    part = first_key // size
    chunk = part // per
    chunks = tl.cdiv(start + rows, CHUNK * N)
    base = slot.to(tl.int64) - part
    row_place = (first_row + row) * HEADS + head * GROUP + f % GROUP
    counter = arrived + (base * KV_HEADS + head) * 2

    tl.debug_barrier()  # every thread's part is written before one of them counts
    complete = size > N
    if size == N:
        units = tl.minimum(CHUNK, tl.cdiv(start + rows, N) - chunk * CHUNK)
        chunk_counter = counter + chunk * (CHUNK * KV_HEADS * 2)
        before = tl.atomic_add(chunk_counter, 1)
        complete = before == units - 1
        if complete:
            tl.store(chunk_counter, 0)
            m = tl.full([R], float("-inf"), tl.float32)
            z = tl.zeros([R], tl.float32)
            acc = tl.zeros([R, BLOCK_D], tl.float32)
            first, stop = begin // N, tl.cdiv(end, N)
            for unit in range(chunk * CHUNK, chunk * CHUNK + units, AT_ONCE):
                at = ((base + unit) * KV_HEADS + head) * M + f
                m, z, acc = _merge_parts(
                    m, z, acc, sums, parts, at, KV_HEADS * M, unit, first, stop, row, rows,
                    BLOCK_D, AT_ONCE,
                )  # fmt: skip
            if chunks == 1:
                _store(out, lse, m, z, acc, row_place, row < rows, D, LSE)
            else:
                tl.debug_barrier()  # read by all threads before it is written over
                to = ((base + chunk * CHUNK) * KV_HEADS + head) * M + f
                _keep_part(sums, parts, to, row < rows, m, z, acc, BLOCK_D)
                tl.debug_barrier()
    if complete & (chunks > 1):
        before = tl.atomic_add(counter + 1, 1)
        if before == chunks - 1:
            tl.store(counter + 1, 0)
            m = tl.full([R], float("-inf"), tl.float32)
            z = tl.zeros([R], tl.float32)
            acc = tl.zeros([R, BLOCK_D], tl.float32)
            first, stop = begin // (CHUNK * N), tl.cdiv(end, CHUNK * N)
            for begun in range(first // AT_ONCE * AT_ONCE, stop, AT_ONCE * TURNS):
                for turn in tl.static_range(TURNS):
                    number = begun + turn * AT_ONCE
                    at = ((base + number * per) * KV_HEADS + head) * M + f
                    m, z, acc = _merge_parts(
                        m, z, acc, sums, parts, at, KV_HEADS * M * per, number, first, stop, row,
                        rows, BLOCK_D, AT_ONCE,
                    )  # fmt: skip
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
    TURNS: tl.constexpr = 4 if R * BLOCK_D <= 256 else 2 if R * BLOCK_D <= 512 else 1
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

        m = tl.full([R], float("-inf"), tl.float32)
        z = tl.zeros([R], tl.float32)
        acc = tl.zeros([R, BLOCK_D], tl.float32)
        whole_m = tl.full([R], float("-inf"), tl.float32)
        whole_z = tl.zeros([R], tl.float32)
        whole_acc = tl.zeros([R, BLOCK_D], tl.float32)
        step = KV_HEADS * M
        begun = first // AT_ONCE * AT_ONCE
        if per == 1:
            for slots in range(begun, stop, AT_ONCE * TURNS):
                for turn in tl.static_range(TURNS):
                    slot = slots + turn * AT_ONCE
                    place = ((base + slot) * KV_HEADS + head) * M + f
                    whole_m, whole_z, whole_acc = _merge_parts(
                        whole_m, whole_z, whole_acc, sums, parts, place, step, slot, first, stop,
                        row, rows, BLOCK_D, AT_ONCE,
                    )  # fmt: skip
        else:
            for slot in range(begun, stop, AT_ONCE):
                place = ((base + slot) * KV_HEADS + head) * M + f
                m, z, acc = _merge_parts(
                    m, z, acc, sums, parts, place, step, slot, first, stop, row, rows, BLOCK_D,
                    AT_ONCE,
                )  # fmt: skip
                if (slot + AT_ONCE) % CHUNK == 0:
                    whole_m, whole_z, whole_acc = _merge(whole_m, whole_z, whole_acc, m, z, acc)
                    m = tl.full([R], float("-inf"), tl.float32)
                    z = tl.zeros([R], tl.float32)
                    acc = tl.zeros([R, BLOCK_D], tl.float32)
        m, z, acc = _merge(whole_m, whole_z, whole_acc, m, z, acc)
        query_head = head * GROUP + (tile * M + f) % GROUP
        place = (first_row + row) * HEADS + query_head
        _store(out, lse, m, z, acc, place, real, D, LSE)
        base, tile, per, start, rows, first_row = following
