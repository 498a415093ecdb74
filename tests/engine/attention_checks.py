"""Checks of TRITON_ATTN against the definition. Run under the interpreter by
test_triton_attention.py; they import triton, so a test process must not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import LayerMode, Span
from engine.attention.few_rows import FEW, equal_few_rows
from engine.attention.kernels.schedule import Tiles
from engine.attention.lse import combine
from engine.attention.mask import attention_ref, gather, key_range
from engine.attention.triton_attn import TritonAttention
from engine.attention.triton_paged import TritonPlan
from engine.kv.cache import KVCache, KVGeometry
from engine.kv.pool import PagePool
from tests.engine.attention_parts import cut, sizes

MODES = [
    LayerMode(),
    LayerMode(causal=False),
    LayerMode(window=7),
    LayerMode(causal=False, window=7),
    LayerMode(window=70),
]
# (start, rows): a prompt, single tokens, a block, a chunk across page edges, an unused span.
BATCH = [(0, 13), (150, 1), (0, 1), (50, 0), (100, 9)]
SMALL = Tiles(rows=16, keys=16, chunk=8, warps=4, stages=2)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def build(
    batch: Sequence[tuple[int, int]], kv_heads: int, dim: int, page: int, dtype: torch.dtype
) -> tuple[KVCache, list[Span]]:
    """Pages in shuffled order; whatever no span holds is NaN."""
    torch.manual_seed(5)
    needed = [-(-(start + rows) // page) for start, rows in batch]
    pool = PagePool(sum(needed) + 2, page)
    geometry = KVGeometry(len(MODES), kv_heads, dim, page, dtype)
    cache = KVCache(geometry, pool.page_count)
    order = torch.randperm(pool.page_count).tolist()
    spans, first = [], 0
    for (start, rows), count in zip(batch, needed, strict=True):
        table = pool.allocate(start + rows)
        table.pages = [order.pop() for _ in range(count)]
        spans.append(Span(table, start, first, rows))
        first += rows
    held = torch.zeros(pool.page_count * page, dtype=torch.bool)
    for span in spans:
        ends = range(span.start + span.row_count)
        held[[span.table.pages[i // page] * page + i % page for i in ends]] = True
    for tensor in (*cache.k, *cache.v):
        values = torch.randn(tensor.shape)
        values.view(-1, kv_heads, dim)[~held] = torch.nan
        tensor.copy_(values.to(dtype))
    return cache, spans


def queries(spans: Sequence[Span], heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(sum(span.row_count for span in spans), heads, dim).to(dtype)


def error(out: Tensor, wanted: Tensor) -> float:
    assert bool(torch.isfinite(out).all())
    return float((out.double() - wanted.double()).norm() / wanted.double().norm())


def compare(
    shape: tuple[int, int, int, int],
    cache_dtype: torch.dtype,
    dtype: torch.dtype,
    tiles: Tiles | None,
    processors: int,
    modes: Sequence[int] = range(len(MODES)),
    batch: Sequence[tuple[int, int]] = BATCH,
) -> None:
    heads, kv_heads, dim, page = shape
    cache, spans = build(batch, kv_heads, dim, page, cache_dtype)
    q = queries(spans, heads, dim, dtype)
    backend = TritonAttention(cache, heads, MODES, dtype, tiles, processors)
    plan = backend.plan(spans)
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    for layer in modes:
        wanted = attention_ref(cache, layer, MODES[layer], spans, q)
        found = error(backend.run(plan, layer, q), wanted)
        assert found < limit, (shape, cache_dtype, dtype, tiles, MODES[layer], found)


def check_all_modes_match_fp64() -> None:
    """AB-11, AB-20: every mode, windows included, against the dense reference."""
    compare((3, 1, 64, 16), torch.float32, torch.float32, SMALL, 100)
    compare((8, 2, 80, 5), torch.float32, torch.float32, SMALL, 1, [0, 3])


def check_dtypes_and_head_sizes() -> None:
    """AB-7, AB-8: 8-bit keys with non-causal layers too."""
    two = [(90, 1), (30, 5)]
    one, both = ([1], two), ([0, 3], two)
    compare((2, 2, 32, 32), torch.bfloat16, torch.bfloat16, None, 0, *one)
    compare((8, 1, 128, 16), torch.float16, torch.float16, None, 0, *one)
    compare((4, 2, 96, 64), torch.bfloat16, torch.float32, None, 0, *one)
    compare((2, 1, 256, 16), torch.bfloat16, torch.bfloat16, None, 0, *one)
    for stored, used in itertools.product(FP8, (torch.bfloat16, torch.float16)):
        compare((4, 2, 32, 16), stored, used, SMALL, 2, *both)
    compare((4, 2, 32, 16), FP8[0], torch.float32, SMALL, 2, *one)
    compare((4, 2, 32, 16), torch.float32, torch.bfloat16, SMALL, 2, *one)


def check_rows_stand_alone() -> None:
    """A row has the same bits in a batch, alone in its span, by itself, and however its keys are
    shared out: over single units, over chunks, or all in one program."""
    heads, dim, dtype = 3, 32, torch.float32
    cache, spans = build(BATCH, 1, dim, 16, dtype)
    q = queries(spans, heads, dim, dtype)
    whole, units, _, chunks = (
        cut(TritonAttention(cache, heads, MODES, dtype, SMALL), keys)
        for keys in sizes(SMALL).values()
    )
    parts = [int(b.plan(spans).words[:2].sum()) for b in (whole, chunks, units)]
    assert parts[0] < parts[1] < parts[2], parts
    for layer, mode in enumerate(MODES):
        out = whole.run(whole.plan(spans), layer, q)
        assert whole.rows_independent
        for other in (chunks, units):
            assert torch.equal(other.run(other.plan(spans), layer, q), out), mode
        for span in spans[1:]:
            rows = slice(span.first_row, span.first_row + span.row_count)
            only = chunks.plan([replace(span, first_row=0)])
            assert torch.equal(chunks.run(only, layer, q[rows]), out[rows]), mode
        span = spans[-1]
        for i in range(0, span.row_count if mode.causal else 0, 4):
            single = units.plan([Span(span.table, span.start + i, 0, 1)])
            row = span.first_row + i
            assert torch.equal(units.run(single, layer, q[row : row + 1])[0], out[row])


class Rounded(TritonAttention):
    """Other bits from tiles of few rows."""

    def run(self, plan: TritonPlan, layer: int, q: Tensor) -> Tensor:
        out = super().run(plan, layer, q)
        return out if plan.rows > FEW else out * (1 + 1e-6)


class RoundedWindow(Rounded):
    """The same in layers with a window only."""

    def run(self, plan: TritonPlan, layer: int, q: Tensor) -> Tensor:
        windowed = self.modes[layer].window is not None
        return super().run(plan, layer, q) if windowed else Equal.run(self, plan, layer, q)


class Equal(TritonAttention):
    """The same bits whatever the rows."""

    def run(self, plan: TritonPlan, layer: int, q: Tensor) -> Tensor:
        return q


def check_few_rows_are_tried() -> None:
    """They are used where their bits are the same, and nowhere else."""
    geometry, tiles = KVGeometry(2, 1, 32, 16, torch.float32), replace(SMALL, rows=32)
    cpu, windowed = torch.device("cpu"), LayerMode(window=20)

    def found(kind: type[TritonAttention], modes: tuple[LayerMode, ...], tiles: Tiles) -> int:
        return equal_few_rows(kind, geometry, 3, torch.float32, modes, tiles, cpu)

    assert found(Equal, (LayerMode(), windowed), tiles) == FEW
    assert found(Rounded, (LayerMode(),), tiles) == 32
    assert found(RoundedWindow, (LayerMode(),), tiles) == FEW
    assert found(RoundedWindow, (LayerMode(), windowed), tiles) == 32
    assert found(Rounded, (LayerMode(),), SMALL) == SMALL.rows


def check_words_are_refilled() -> None:
    """AB-10: the plan of a capture runs other batches, fewer of them and unused spans, as eagerly.

    What is launched depends on the capacities, so a graph replay does the same.
    """
    cache, spans = build([(150, 4), (3, 4), (70, 4), (31, 4)], 1, 32, 16, torch.float32)
    for processors in (1, 2):
        _refill(TritonAttention(cache, 2, MODES, torch.float32, SMALL, processors), spans)


def _refill(backend: TritonAttention, spans: Sequence[Span]) -> None:
    width, capacity, pages = 4, 3, 12
    # Words that nobody wrote say anything, such as items far outside of all memory.
    host = np.arange(backend.words(capacity, capacity * width, pages), dtype=np.int32) << 20
    words = torch.from_numpy(host)
    plan = backend.view(words, capacity, pages, width)
    q = torch.randn(capacity * width, 2, 32)
    for batch in ([0, 1, 2], [3], [2, 0]):
        chosen = [replace(spans[i], first_row=n * width) for n, i in enumerate(batch)]
        padded = chosen + [replace(spans[0], row_count=0)] * (capacity - len(chosen))
        for given in (chosen, padded):
            backend.fill(host, given, capacity, pages)
            rows = slice(len(chosen) * width)
            for layer in (3,) if given is padded else (0, 3):
                eager = backend.run(backend.plan(chosen), layer, q[rows])
                assert torch.equal(backend.run(plan, layer, q)[rows], eager)
    # The last programs have added up, and left their counters as they were.
    assert plan.finish and int(words[1]) > 0 and not bool(plan.arrived.any())


def check_lse_over_shards() -> None:
    """AB-23: shards of the keys, an empty one among them, joined by their log-sum-exps in both
    bases, give attention over all keys."""
    heads, kv_heads, dim, rows, page = 3, 1, 32, 5, 16
    cache, spans = build([(139, rows)], kv_heads, dim, page, torch.float32)
    layer, span = 1, spans[0]
    q = queries(spans, heads, dim, torch.float32)
    backend = TritonAttention(cache, heads, MODES, torch.float32, SMALL, 2)
    wanted, total = backend.run_with_lse(backend.plan(spans), layer, q)
    k = gather(cache, layer, span, 144)[0].double().repeat_interleave(3, 1)
    scores = torch.einsum("rhd,khd->rhk", q.double(), k) / math.sqrt(dim)
    torch.testing.assert_close(total, scores.logsumexp(-1).float(), atol=2e-6, rtol=1e-6)
    for cuts in ([0, 144], [0, 16, 144], [0, 0, 48, 48, 64, 144, 144]):
        outs, lses = [], []
        for low, high in itertools.pairwise(cuts):
            table = PagePool(99, page).allocate(0)
            table.pages = span.table.pages[low // page : high // page]
            shard = Span(table, high - low - rows, 0, rows)
            out, lse = backend.run_with_lse(backend.plan([shard]), layer, q)
            assert (low < high) or (bool((lse == -math.inf).all()) and not bool(out.any()))
            outs.append(out)
            lses.append(lse)
        for base, scale in (("e", 1.0), ("2", 1 / math.log(2.0))):
            joined = combine(torch.stack(outs), torch.stack(lses) * scale, base)
            assert error(joined, wanted) < 1e-6, (cuts, base)


def check_strided_queries() -> None:
    cache, spans = build([(5, 4)], 3, 64, 16, torch.float32)
    fused = torch.randn(4, 15 * 64)
    q = fused[:, : 9 * 64].unflatten(1, (9, 64))
    backend = TritonAttention(cache, 9, MODES)
    plan = backend.plan(spans)
    first = backend.run(plan, 1, q)
    assert torch.equal(backend.run(plan, 1, q.contiguous()), first)
    assert torch.equal(backend.run(plan, 1, q.transpose(0, 1).contiguous().transpose(0, 1)), first)


def check_windows_beyond_the_block() -> None:
    """AB-15: window 8, a block of 8 rows, contexts around the window."""
    modes = [LayerMode(causal, 8) for causal in (True, False)] + [LayerMode()] * 3
    batch = [(0, 8), (7, 8), (9, 8), (100, 8)]
    cache, spans = build(batch, 1, 32, 16, torch.float32)
    q = queries(spans, 2, 32, torch.float32)
    backend = TritonAttention(cache, 2, modes, torch.float32, SMALL, 2)
    for layer in (0, 1):
        wanted = attention_ref(cache, layer, modes[layer], spans, q)
        assert error(backend.run(backend.plan(spans), layer, q), wanted) < 1e-5
        low, high = key_range(modes[layer], spans)
        assert int((high - low).max()) == (8 if layer == 0 else 15)
