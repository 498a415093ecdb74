"""The Triton kernel of attention over paged latent KV; `paged.py` cuts a row's keys, adds up its
parts, and says why a row's bits depend on nothing else.

A token's latent vector is the key of all heads but for the part that turns, and its value: it is
loaded once and used twice. All query heads are folded into the rows of a tile.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from engine.attention.kernels.paged import _dot, _keys, _merge, _store
from engine.attention.kernels.parts import _nothing


@triton.jit
def _latent(
    values, scales, page, offset, inside, d, stride_page, stride_token, stride_scale_page,
    stride_scale_token, RANK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Latent vectors [N, BLOCK_D] of the keys, as stored, or fp32 out of the fp8 layout."""
    keep = inside[:, None] & (d[None, :] < RANK)
    place = page * stride_page + offset * stride_token
    latent = tl.load(values + place[:, None] + d[None, :], mask=keep, other=0.0)
    if PACKED:
        place = page * stride_scale_page + offset * stride_scale_token
        scale = tl.load(scales + place[:, None] + d[None, :] // 128, mask=keep, other=0.0)
        latent = latent.to(tl.float32) * scale
    return latent


@triton.jit
def _attend_latent(
    q, values, scales, rope, out, lse, sums, parts, words, items_at, table_at, pages_per_span,
    stride_q, stride_page, stride_token, stride_scale_page, stride_scale_token, stride_rope_page,
    stride_rope_token, scale, window,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, M: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr,
    PAGE: tl.constexpr, CAUSAL: tl.constexpr, WHOLE: tl.constexpr, LSE: tl.constexpr,
    PACKED: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Grid (1, programs); items, words and partial results as in `paged._attend`, with one KV head.

    q [rows, HEADS, RANK + ROPE] with rows stride_q apart; values [pages, PAGE, RANK], rope [pages,
    PAGE, ROPE] and, in the fp8 layout (PACKED), scales [pages, PAGE, RANK / 128]. Products are in
    the dtype of q; IEEE: in fp32, never in fewer bits. scale contains log2(e).
    """
    BUNDLE: tl.constexpr = CHUNK // 4
    f = tl.arange(0, M)
    d = tl.arange(0, BLOCK_D)
    r = tl.arange(0, BLOCK_R)
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

        row = (tile * M + f) // HEADS
        head = (tile * M + f) % HEADS
        real = row < rows
        low, high = _keys(start, rows, window, row, row, CAUSAL)
        high = tl.where(real, high, 0)
        last = tl.minimum((tile * M + M - 1) // HEADS, rows - 1)
        begin, end = _keys(start, rows, window, tile * M // HEADS, last, CAUSAL)
        begin = tl.maximum(begin, first_key)
        end = tl.minimum(end, last_key)

        at = (first_row + row)[:, None].to(tl.int64) * stride_q + head[:, None] * (RANK + ROPE)
        still = real[:, None] & (d[None, :] < RANK)
        query = tl.load(q + at + d[None, :], mask=still, other=0.0)
        turning = real[:, None] & (r[None, :] < ROPE)
        turned = tl.load(q + at + RANK + r[None, :], mask=turning, other=0.0)
        m, z, acc = _nothing(M, BLOCK_D)
        chunk_m, chunk_z, chunk_acc = _nothing(M, BLOCK_D)
        whole_m, whole_z, whole_acc = _nothing(M, BLOCK_D)
        table = words + table_at + span * pages_per_span
        for unit in range(begin // N, tl.cdiv(end, N)):
            key = unit * N + tl.arange(0, N)
            inside = (key >= begin) & (key < end)
            page = tl.load(table + key // PAGE, mask=inside, other=0).to(tl.int64)
            latent = _latent(
                values, scales, page, key % PAGE, inside, d, stride_page, stride_token,
                stride_scale_page, stride_scale_token, RANK, PACKED,
            ).to(query.dtype)  # fmt: skip
            place = page * stride_rope_page + (key % PAGE) * stride_rope_token
            known = inside[None, :] & (r[:, None] < ROPE)
            key_turned = tl.load(rope + place[None, :] + r[:, None], mask=known, other=0.0)
            s = _dot(query, tl.trans(latent), IEEE)
            s += _dot(turned, key_turned.to(query.dtype), IEEE)
            seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
            s = tl.where(seen, s * scale, float("-inf"))
            unit_m = tl.max(s, 1)
            p = tl.exp2(s - tl.where(unit_m == float("-inf"), 0.0, unit_m)[:, None])
            unit_z = tl.sum(p, 1)
            unit_acc = _dot(p.to(query.dtype), latent, IEEE)
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
            _store(out, lse, m, z, acc, (first_row + row) * HEADS + head, real, RANK, LSE)
        else:
            slot_at = slot.to(tl.int64) * M + f
            keep = row < tl.where(begin < end, rows, 0)
            tl.store(sums + slot_at * 2, m, mask=keep)
            tl.store(sums + slot_at * 2 + 1, z, mask=keep)
            tl.store(parts + slot_at[:, None] * BLOCK_D + d[None, :], acc, mask=keep[:, None])
