"""Both backends against fp64, row independence of CPU_ATTN, and selection without substitutes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from engine.attention.base import LayerMode, Span
from engine.attention.mask import attention_ref, key_range
from engine.attention.select import make_backend
from engine.errors import BackendUnavailable
from engine.kernels.cpu import ops
from engine.kv.cache import KVCache, KVGeometry
from engine.kv.pool import PagePool

MODES = [
    LayerMode(),
    LayerMode(causal=False),
    LayerMode(window=7),
    LayerMode(causal=False, window=7),
    LayerMode(window=1),
]
# (start, rows) of a ragged batch: a prompt, single tokens, a block, a chunk across page edges.
BATCH = [(0, 13), (100, 1), (37, 8), (0, 1), (63, 17)]
BACKENDS = [("CPU_ATTN", 0), ("TORCH_SDPA", 0), ("TORCH_SDPA", 64)]


def build(
    batch: Sequence[tuple[int, int]], kv_heads: int, dim: int, page_tokens: int, dtype: torch.dtype
) -> tuple[KVCache, list[Span]]:
    torch.manual_seed(1)
    shuffle = random.Random(1).shuffle
    pages = sum(-(-(start + rows) // page_tokens) for start, rows in batch) + 2
    pool = PagePool(pages, page_tokens)
    cache = KVCache(KVGeometry(len(MODES), kv_heads, dim, page_tokens, dtype), pages)
    for tensor in (*cache.k, *cache.v):
        tensor.normal_()
    spans, first = [], 0
    for start, rows in batch:
        table = pool.allocate(start + rows)
        shuffle(table.pages)
        spans.append(Span(table, start, first, rows))
        first += rows
    return cache, spans


@pytest.mark.parametrize(("name", "bucket"), BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_tokens"),
    [(9, 3, 64, 16), (8, 1, 128, 5), (4, 4, 80, 1), (4, 2, 8, 32)],
)
def test_matches_fp64(
    heads: int,
    kv_heads: int,
    dim: int,
    page_tokens: int,
    dtype: torch.dtype,
    name: str,
    bucket: int,
) -> None:
    cache, spans = build(BATCH, kv_heads, dim, page_tokens, dtype)
    q = torch.randn(sum(span.row_count for span in spans), heads, dim)
    backend, _ = make_backend(name, cache, heads, MODES, True, bucket)
    plan = backend.plan(spans)
    for layer, mode in enumerate(MODES):
        out = backend.run(plan, layer, q)
        expected = attention_ref(cache, layer, mode, spans, q)
        torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_stand_alone(dtype: torch.dtype) -> None:
    """A row has the same bits in a batch, alone in its span, and, when causal, run by itself."""
    cache, spans = build(BATCH, 3, 64, 16, dtype)
    q = torch.randn(sum(span.row_count for span in spans), 9, 64)
    backend, _ = make_backend("CPU_ATTN", cache, 9, MODES, True)
    assert backend.rows_independent
    plan = backend.plan(spans)
    for layer, mode in enumerate(MODES):
        out = backend.run(plan, layer, q)
        for span in spans:
            rows = slice(span.first_row, span.first_row + span.row_count)
            only = backend.plan([Span(span.table, span.start, 0, span.row_count)])
            assert torch.equal(backend.run(only, layer, q[rows]), out[rows])
            for i in range(span.row_count if mode.causal else 0):
                row = span.first_row + i
                single = backend.plan([Span(span.table, span.start + i, 0, 1)])
                assert torch.equal(backend.run(single, layer, q[row : row + 1])[0], out[row])


def test_stale_keys_past_the_end_do_not_matter() -> None:
    """Slots behind a row may hold NaN or rejected drafts."""
    cache, spans = build([(20, 3)], 3, 64, 16, torch.float32)
    q = torch.randn(3, 9, 64)
    for name in ("CPU_ATTN", "TORCH_SDPA"):
        backend, _ = make_backend(name, cache, 9, MODES, True)
        before = backend.run(backend.plan(spans), 0, q)
        slots = [spans[0].table.slot(position) for position in range(23, 32)]
        cache.k[0].view(-1, 3, 64)[slots] = torch.nan
        cache.v[0].view(-1, 3, 64)[slots] = torch.nan
        assert torch.equal(backend.run(backend.plan(spans), 0, q), before)


def test_strided_queries_and_reused_plan() -> None:
    cache, spans = build([(5, 4)], 3, 64, 16, torch.float32)
    fused = torch.randn(4, 15 * 64)
    q = fused[:, : 9 * 64].unflatten(1, (9, 64))
    backend, _ = make_backend(None, cache, 9, MODES, True)
    plan = backend.plan(spans)
    first = backend.run(plan, 1, q)
    assert torch.equal(backend.run(plan, 1, q.contiguous()), first)


def test_key_range_follows_the_definition() -> None:
    _, spans = build([(3, 4)], 1, 8, 4, torch.float32)
    low, high = key_range(LayerMode(causal=False, window=3), spans)
    assert (low.tolist(), high.tolist()) == ([1, 2, 3, 4], [6, 7, 7, 7])
    low, high = key_range(LayerMode(window=3), spans)
    assert (low.tolist(), high.tolist()) == ([1, 2, 3, 4], [4, 5, 6, 7])


def cache_of(dtype: torch.dtype = torch.float32, dim: int = 64) -> KVCache:
    return KVCache(KVGeometry(len(MODES), 3, dim, 16, dtype), 2)


def test_default_is_native_and_reported() -> None:
    cache = cache_of()
    backend, report = make_backend(None, cache, 9, MODES, True)
    assert backend.name == report.chosen == "CPU_ATTN"
    assert (report.requested, report.kv_dtype, report.page_tokens) == ("", "float32", 16)
    assert report.kv_bytes_per_token == 2 * len(MODES) * 3 * 64 * 4
    assert [c.name for c in report.candidates] == ["CPU_ATTN", "TORCH_SDPA"]


def test_refusals_are_reported_and_fall_through_only_when_unset() -> None:
    backend, report = make_backend("", cache_of(), 9, MODES, False)
    assert backend.name == "TORCH_SDPA"
    assert report.candidates[0].reasons == ("native kernels are switched off for this service",)
    with pytest.raises(
        BackendUnavailable, match=r"CPU_ATTN: \[.*switched off.*TORCH_SDPA: \[valid"
    ):
        make_backend("CPU_ATTN", cache_of(), 9, MODES, False)


@pytest.mark.parametrize("name", ["FLASHINFER", "cpu_attn", "auto"])
def test_unknown_name_lists_everything(name: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        make_backend(name, cache_of(), 9, MODES, True)
    assert str(caught.value) == (
        f"unknown attention backend {name!r}, accepted: CPU_ATTN, TORCH_SDPA: "
        "{CPU_ATTN: [valid], TORCH_SDPA: [valid]}"
    )


def test_limits_of_the_native_backend() -> None:
    with pytest.raises(BackendUnavailable, match="kv dtype float16, accepted: float32, bfloat16"):
        make_backend("CPU_ATTN", cache_of(torch.float16), 9, MODES, True)
    with pytest.raises(BackendUnavailable, match="head_dim 60, accepted: multiples of 8"):
        make_backend("CPU_ATTN", cache_of(dim=60), 9, MODES, True)
    with pytest.raises(BackendUnavailable, match="10 query heads are no multiple of 3 KV heads"):
        make_backend(None, cache_of(), 10, MODES, True)
    with pytest.raises(BackendUnavailable, match="window 0 is below 1"):
        make_backend(None, cache_of(), 9, [*MODES[1:], LayerMode(window=0)], True)
    with pytest.raises(BackendUnavailable, match="2 layer modes for 5 layers"):
        make_backend(None, cache_of(), 9, MODES[:2], True)


def test_missing_kernels_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "available", lambda: False)
    monkeypatch.setattr(ops, "unavailable_reason", lambda: "no C compiler (cc not found)")
    backend, report = make_backend(None, cache_of(), 9, MODES, True)
    assert backend.name == "TORCH_SDPA"
    assert report.candidates[0].reasons == ("no C compiler (cc not found)",)
