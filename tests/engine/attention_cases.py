"""Attention on a GPU against fp64: batches, the reference on the device, and what must be equal
bit by bit. Used by test_attention_gpu.py and tests/load/bench_attention.py."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, DeviceAttention, LayerMode, Span
from engine.attention.few_rows import FEW
from engine.attention.mask import gather, key_range
from engine.kv.cache import KVCache, KVGeometry
from engine.kv.pool import PagePool
from tests.engine.attention_parts import cut, sizes

if TYPE_CHECKING:
    from engine.attention.triton_attn import TritonAttention

MODES = (
    LayerMode(),
    LayerMode(causal=False),
    LayerMode(window=100),
    LayerMode(causal=False, window=100),
)
LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}
WIDTHS = (1, 8)  # of the spans of captured steps
CONTEXTS = (1, 15, 17, 64, 100, 129, 513, 1000, 1024, 1500, 2048, 4096, 5000, 8192)


@dataclass(frozen=True, slots=True)
class Case:
    """`ratio` query heads a KV head; dtypes by torch's names."""

    backend: str
    dim: int
    ratio: int
    page: int
    dtype: str = "bfloat16"
    kv_dtype: str = ""
    kv_heads: int = 2
    # TRITON_ATTN: rows are compared bit by bit too, which takes four times as many kernels, and
    # those compile for longer than they run.
    bits: bool = True
    causal: tuple[bool, ...] = (True, False)
    device: str = "cuda"

    @property
    def types(self) -> tuple[torch.dtype, torch.dtype]:
        return getattr(torch, self.dtype), getattr(torch, self.kv_dtype or self.dtype)

    def __str__(self) -> str:
        kv = self.kv_dtype or self.dtype
        return f"{self.backend} d={self.dim} gqa={self.ratio} page={self.page} {self.dtype}/{kv}"


def modes_of(case: Case) -> tuple[LayerMode, ...]:
    modes = MODES[:2] if case.backend == "FLASHINFER" else MODES
    return tuple(mode for mode in modes if mode.causal in case.causal)


def batch_of(longest: int = 32768) -> list[tuple[int, int]]:
    """(start, rows): every query length 1..16 at some context 1..32k, and a chunk of a prompt."""
    spans = [(CONTEXTS[i % len(CONTEXTS)], rows) for i, rows in enumerate(range(1, 17))]
    return [*spans, (longest - 8, 8), (longest - 1, 1), (700, 333), (0, 40)]


def build(case: Case, batch: Sequence[tuple[int, int]]) -> tuple[KVCache, list[Span]]:
    """Random keys and values in shuffled pages; those behind the spans' ends too."""
    torch.manual_seed(3)
    pool = PagePool(sum(-(-(s + r) // case.page) for s, r in batch) + 1, case.page)
    layers = len(modes_of(case))
    geometry = KVGeometry(layers, case.kv_heads, case.dim, case.page, case.types[1])
    cache = KVCache(geometry, pool.page_count, case.device)
    order = list(range(pool.page_count))
    random.Random(3).shuffle(order)
    for tensor in (*cache.k, *cache.v):
        tensor.copy_(torch.randn(tensor.shape, device=case.device))
    spans, first = [], 0
    for start, rows in batch:
        table = pool.allocate(start + rows)
        table.pages = [order.pop() for _ in table.pages]
        spans.append(Span(table, start, first, rows))
        first += rows
    return cache, spans


def queries(case: Case, spans: Sequence[Span]) -> Tensor:
    rows, heads = sum(span.row_count for span in spans), case.ratio * case.kv_heads
    return torch.randn(rows, heads, case.dim, device=case.device).to(case.types[0])


def reference(
    cache: KVCache, layer: int, mode: LayerMode, spans: Sequence[Span], q: Tensor
) -> Tensor:
    """As `mask.attention_ref`, span by span instead of row by row."""
    kv_heads = cache.geometry.kv_heads
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for span in spans:
        rows = slice(span.first_row, span.first_row + span.row_count)
        end = span.start + span.row_count
        k, v = (x.double() for x in gather(cache, layer, span, end))
        low, high = (x.to(q.device) for x in key_range(mode, [span]))
        own = q[rows].double().unflatten(1, (kv_heads, -1))
        scores = torch.einsum("rhgd,khd->hgrk", own, k) * q.shape[2] ** -0.5
        key = torch.arange(end, device=q.device)
        seen = (key >= low[:, None]) & (key < high[:, None])
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hgrk,khd->rhgd", weights, v).flatten(1, 2)
    return out


def make_ours(case: Case, cache: KVCache) -> TritonAttention:
    from engine.attention.triton_attn import TritonAttention

    # Whether tiles of few rows give the same bits a replay of one row finds as well; to try it as
    # the product does takes as many of the largest kernels again.
    heads, few_rows = case.ratio * case.kv_heads, 0 if case.bits and case.ratio == 3 else FEW
    return TritonAttention(cache, heads, modes_of(case), case.types[0], few_rows=few_rows)


def make(case: Case, cache: KVCache) -> AttentionBackend:
    from engine.attention.flash_attn import FlashAttention
    from engine.attention.flashinfer_attn import FlashInferAttention
    from engine.attention.flex_attn import FlexAttention
    from engine.attention.torch_sdpa import TorchSdpa

    if case.backend == "TRITON_ATTN":
        return make_ours(case, cache)
    heads, modes = case.ratio * case.kv_heads, modes_of(case)
    if case.backend == "FLASHINFER":
        return FlashInferAttention(cache, heads, modes, case.types[0])
    kinds = (FlashAttention, FlexAttention, TorchSdpa)
    return {kind.name: kind for kind in kinds}[case.backend](cache, heads, modes)


def launch_all(case: Case, longest: int = 32768, short: int = 6000) -> None:
    """All that the functions below launch with such a case, and no reference; a graph is not
    captured."""
    cache, spans = build(case, batch_of(longest))
    q, backend = queries(case, spans), make(case, cache)
    plan = backend.plan(spans)
    for layer in range(len(backend.modes)):
        backend.run(plan, layer, q)
    if case.bits:
        unequal_rows(case, batch_of(short))
        for width in WIDTHS:
            unequal_replays(case, width, capture=False)
        lse_error(case)


def errors(case: Case, batch: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Relative error ||out - ref|| / ||ref|| of every mode, the worst span's."""
    cache, spans = build(case, batch)
    q = queries(case, spans)
    backend = make(case, cache)
    plan, found = backend.plan(spans), {}
    for layer, mode in enumerate(backend.modes):
        out = backend.run(plan, layer, q).double()
        wanted = reference(cache, layer, mode, spans, q)
        worst = 0.0
        for span in spans:
            rows = slice(span.first_row, span.first_row + span.row_count)
            error = (out[rows] - wanted[rows]).norm() / wanted[rows].norm()
            worst = max(worst, float(error) if torch.isfinite(error) else float("inf"))
        found[str(mode)] = worst
    return found


def unequal_rows(case: Case, batch: Sequence[tuple[int, int]]) -> list[str]:
    """TRITON_ATTN: where a row's bits depend on the schedule, its batch, its span or its width."""
    cache, spans = build(case, batch)
    q = queries(case, spans)
    ours, found = make_ours(case, cache), list[str]()
    kinds = sizes(ours.tiles).items()
    others = {kind: cut(make_ours(case, cache), keys) for kind, keys in kinds}
    for layer, mode in enumerate(ours.modes):
        out = ours.run(ours.plan(spans), layer, q)
        for name, other in others.items():
            if not torch.equal(other.run(other.plan(spans), layer, q), out):
                found.append(f"{mode}: {name}")
        for span in spans:
            rows = slice(span.first_row, span.first_row + span.row_count)
            alone = ours.plan([replace(span, first_row=0)])
            if not torch.equal(ours.run(alone, layer, q[rows]), out[rows]):
                found.append(f"{mode}: {span.row_count} rows at {span.start} alone")
            if mode.causal:
                row = span.first_row + span.row_count // 2
                at = Span(span.table, span.start + span.row_count // 2, 0, 1)
                if not torch.equal(ours.run(ours.plan([at]), layer, q[row : row + 1])[0], out[row]):
                    found.append(f"{mode}: one row at {at.start}")
    return found


def unequal_replays(case: Case, width: int, capture: bool = True) -> list[str]:
    """A graph captured for one batch, replayed for others, against eager runs of those. Without
    `capture`, and on a CPU, the same is launched again instead."""
    starts, capacity = [30, 3000, 900, 8000, 1, 127, 1024 - width], 4
    on_gpu = case.device == "cuda"
    cache, spans = build(case, [(start, width) for start in starts])
    backend = make(case, cache)
    assert isinstance(backend, DeviceAttention)
    pages = max(len(span.table.pages) for span in spans)
    rows = capacity * width
    host = torch.empty(backend.words(capacity, rows, pages), dtype=torch.int32, pin_memory=on_gpu)
    words = torch.empty(host.shape, dtype=torch.int32, device=case.device)
    q = queries(case, spans)[:rows].clone()

    def fill(chosen: Sequence[int]) -> list[Span]:
        own = [replace(spans[i], first_row=n * width) for n, i in enumerate(chosen)]
        if on_gpu:
            torch.cuda.synchronize()
        backend.fill(host.numpy(), own, capacity, pages)
        words.copy_(host, non_blocking=on_gpu)
        return own

    def launch() -> list[Tensor]:
        return [backend.run(plan, layer, q) for layer in range(len(backend.modes))]

    fill([0, 1])
    plan = backend.view(words, capacity, pages, width)
    replay = captured(launch) if capture and on_gpu else launch
    found = []
    for chosen in ([0, 1], [3, 2, 5, 4], [6], [5, 0, 3], [2, 2, 2, 2]):
        own = fill(chosen)
        q.normal_()
        outs, eager = replay(), backend.plan(own)
        used = slice(len(own) * width)
        for layer, mode in enumerate(backend.modes):
            if not torch.equal(outs[layer][used], backend.run(eager, layer, q[used])):
                found.append(f"{mode}: spans {chosen}")
    return found


def captured(launch: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """What replays the launches, and returns what they returned as they were captured."""
    for _ in range(2):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = launch()

    def replay() -> list[Tensor]:
        graph.replay()
        return outs

    return replay


def lse_error(case: Case) -> float:
    """The largest difference of the log-sum-exp from fp64, non-causal rows over 5,000 keys; 0 where
    the case has no such rows."""
    if LayerMode(causal=False) not in modes_of(case):
        return 0.0
    cache, spans = build(case, [(4990, 10), (3, 2)])
    q, ours = queries(case, spans), make_ours(case, cache)
    layer = ours.modes.index(LayerMode(causal=False))
    _, lse = ours.run_with_lse(ours.plan(spans), layer, q)
    worst = 0.0
    for span in spans:
        k = gather(cache, layer, span, span.start + span.row_count)[0].double()
        rows = slice(span.first_row, span.first_row + span.row_count)
        own = q[rows].double().unflatten(1, (case.kv_heads, -1))
        scores = torch.einsum("rhgd,khd->rhgk", own, k) * case.dim**-0.5
        worst = max(worst, float((lse[rows] - scores.logsumexp(-1).flatten(1)).abs().max()))
    return worst


def all_cases() -> list[Case]:
    """Head sizes x GQA ratios x page sizes of TRITON_ATTN in bf16; other dtypes and backends over
    part of them. Those compared bit by bit are causal or not, in turns over sizes and ratios: that
    halves what is compiled."""
    dims, ratios, pages = (64, 128, 80, 256), (1, 3, 4, 8), (16, 32, 64)
    cases = [
        Case("TRITON_ATTN", d, r, p, bits=p == 16) for d in dims for r in ratios for p in pages
    ]
    cases += [Case("TRITON_ATTN", d, r, 16, "float32") for d in dims for r in (1, 4)]
    cases += [Case("TRITON_ATTN", d, 3, 32, "float16") for d in (64, 128)]
    for kv in ("float8_e4m3fn", "float8_e5m2"):
        cases += [Case("TRITON_ATTN", d, 4, 16, "bfloat16", kv) for d in (64, 128)]
    cases.append(Case("TRITON_ATTN", 64, 3, 16, "float32", "bfloat16"))
    cases = [
        replace(case, causal=((dims.index(case.dim) + ratios.index(case.ratio)) % 2 == 0,))
        if case.bits
        else case
        for case in cases
    ]
    for name in ("FLASH_ATTN", "TORCH_SDPA"):
        cases += [Case(name, d, r, 16) for d in dims for r in (1, 3, 8)]
    cases += [
        Case("FLASHINFER", d, r, p) for d in (64, 128) for r, p in ((1, 16), (3, 32), (4, 64))
    ]
    cases.append(Case("FLEX_ATTENTION", 64, 3, 16))
    return cases
