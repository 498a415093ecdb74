"""Partial results of attention and how they are added up: units of keys to chunks, chunks to rows,
always in the order of the keys and by `_merge`, whoever does it. See `paged.py`.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton.dependent import wait


@triton.jit
def _merge(m, z, acc, m2, z2, acc2):
    """Softmax state of two parts: maximum [R], sum [R], weighted values [R, D], in base 2.

    The fused multiply-adds are spelled out, so that no compiler contracts them differently.
    """
    new = tl.maximum(m, m2)
    at = tl.where(new == float("-inf"), 0.0, new)
    a = tl.exp2(m - at)
    b = tl.exp2(m2 - at)
    wide = tl.broadcast_to(a[:, None], acc.shape)
    return new, tl.fma(z, a, z2 * b), tl.fma(acc, wide, acc2 * b[:, None])


@triton.jit
def _keys(start, rows, window, first, last, CAUSAL: tl.constexpr):
    """Keys [low, high) that rows first .. last of a span see together; see LayerMode."""
    end = start + rows
    full = window == 0
    low = tl.where(full, 0, tl.maximum(start + first - window + 1, 0))
    if CAUSAL:
        high = start + last + 1
    else:
        high = tl.where(full, end, tl.minimum(start + last + window, end))
    return low, high


@triton.jit
def _store(out, lse, m, z, acc, place, keep, D: tl.constexpr, LSE: tl.constexpr):
    """Rows of the output at `place` (row * heads + head), and their natural log-sum-exp."""
    total = tl.where(z == 0.0, 1.0, z)
    d = tl.arange(0, acc.shape[1])
    at = place[:, None].to(tl.int64) * D + d[None, :]
    value = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + at, value, mask=keep[:, None] & (d[None, :] < D))
    if LSE:
        value = tl.where(z == 0.0, float("-inf"), (m + tl.log2(total)) * 0.6931471805599453)
        tl.store(lse + place, value, mask=keep)


@triton.jit
def _part(sums, parts, place, keep, BLOCK_D: tl.constexpr):
    """A partial result; where it is not kept, that of no keys. Never out of the L1 cache, which
    knows nothing of what other programs wrote."""
    d = tl.arange(0, BLOCK_D)
    m = tl.load(sums + place * 2, mask=keep, other=float("-inf"), cache_modifier=".cg")
    z = tl.load(sums + place * 2 + 1, mask=keep, other=0.0, cache_modifier=".cg")
    acc = tl.load(
        parts + place[:, None] * BLOCK_D + d[None, :], mask=keep[:, None], other=0.0,
        cache_modifier=".cg",
    )  # fmt: skip
    return m, z, acc


@triton.jit
def _merge_parts(
    m, z, acc, sums, parts, place, step, slot, first, stop, row, rows,
    BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The state with AT_ONCE (4 or 8) more parts, `step` apart from `place`: numbers slot, slot + 1
    and on, empty in front of `first` and from `stop` on. All loads are in flight together."""
    here = row < tl.where((slot >= first) & (slot < stop), rows, 0)
    m0, z0, acc0 = _part(sums, parts, place, here, BLOCK_D)
    here = row < tl.where((slot + 1 >= first) & (slot + 1 < stop), rows, 0)
    m1, z1, acc1 = _part(sums, parts, place + step, here, BLOCK_D)
    here = row < tl.where((slot + 2 >= first) & (slot + 2 < stop), rows, 0)
    m2, z2, acc2 = _part(sums, parts, place + 2 * step, here, BLOCK_D)
    here = row < tl.where((slot + 3 >= first) & (slot + 3 < stop), rows, 0)
    m3, z3, acc3 = _part(sums, parts, place + 3 * step, here, BLOCK_D)
    if AT_ONCE == 8:
        here = row < tl.where((slot + 4 >= first) & (slot + 4 < stop), rows, 0)
        m4, z4, acc4 = _part(sums, parts, place + 4 * step, here, BLOCK_D)
        here = row < tl.where((slot + 5 >= first) & (slot + 5 < stop), rows, 0)
        m5, z5, acc5 = _part(sums, parts, place + 5 * step, here, BLOCK_D)
        here = row < tl.where((slot + 6 >= first) & (slot + 6 < stop), rows, 0)
        m6, z6, acc6 = _part(sums, parts, place + 6 * step, here, BLOCK_D)
        here = row < tl.where((slot + 7 >= first) & (slot + 7 < stop), rows, 0)
        m7, z7, acc7 = _part(sums, parts, place + 7 * step, here, BLOCK_D)
    m, z, acc = _merge(m, z, acc, m0, z0, acc0)
    m, z, acc = _merge(m, z, acc, m1, z1, acc1)
    m, z, acc = _merge(m, z, acc, m2, z2, acc2)
    m, z, acc = _merge(m, z, acc, m3, z3, acc3)
    if AT_ONCE == 8:
        m, z, acc = _merge(m, z, acc, m4, z4, acc4)
        m, z, acc = _merge(m, z, acc, m5, z5, acc5)
        m, z, acc = _merge(m, z, acc, m6, z6, acc6)
        m, z, acc = _merge(m, z, acc, m7, z7, acc7)
    return m, z, acc


@triton.jit
def _keep_part(sums, parts, place, keep, m, z, acc, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    tl.store(sums + place * 2, m, mask=keep)
    tl.store(sums + place * 2 + 1, z, mask=keep)
    tl.store(parts + place[:, None] * BLOCK_D + d[None, :], acc, mask=keep[:, None])


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
    """The words of a tile to combine, zeros where there is none; the first slot is int64."""
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
