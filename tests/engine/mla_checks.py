"""TRITON_MLA against fp64, and its rows against each other, bit for bit: under the interpreter in
test_mla_attention.py, on a GPU by `python -m tests.engine.mla_checks`, which prints a line a case.
"""

from __future__ import annotations

import random
import tempfile
import traceback
from pathlib import Path

import torch

from engine.attention.base import LayerMode, Span
from engine.attention.kernels.latent_store import store_latent
from engine.attention.kernels.schedule import Tiles
from engine.attention.mask import attention_ref, gather, key_range
from engine.attention.triton_mla import TritonMla
from engine.kernels.cpu.reference import rms_norm_ref, rotate_ref
from engine.kv.latent import LatentCache, LatentGeometry
from engine.kv.pool import PagePool
from engine.models.rope import Rope, rope_tables
from tests.engine import latent_gpu
from tests.engine.attention_parts import cut, sizes
from tests.engine.tiny import LATENT, load_tiny, random_ids, run, write_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODES = [
    LayerMode(),
    LayerMode(causal=False),
    LayerMode(window=7),
    LayerMode(causal=False, window=7),
]
# (start, rows): a prompt, a single token, a block across chunks, a first token.
BATCH = [(0, 5), (100, 1), (60, 8), (0, 1)]
SMALL = Tiles(16, 16, 8, 4, 1)  # so that few keys make several units and chunks


def build(
    batch: list[tuple[int, int]], rank: int, rope: int, page_tokens: int, layout: str
) -> tuple[LatentCache, list[Span]]:
    torch.manual_seed(1)
    pages = sum(-(-(start + rows) // page_tokens) for start, rows in batch) + 2
    pool = PagePool(pages, page_tokens)
    cache = LatentCache(LatentGeometry(len(MODES), rank, rope, page_tokens, layout), pages, DEVICE)
    spans, first = [], 0
    for start, rows in batch:
        table = pool.allocate(start + rows)
        random.Random(1).shuffle(table.pages)
        spans.append(Span(table, start, first, rows))
        first += rows
    every = torch.arange(pages * page_tokens, device=DEVICE)
    for layer in range(len(MODES)):
        cache.write(layer, torch.randn(len(every), rank + rope, device=DEVICE), every)
    return cache, spans


def lse_ref(
    cache: LatentCache, layer: int, spans: list[Span], q: torch.Tensor, scale: float
) -> torch.Tensor:
    """From the definition, fp64 [rows, heads]."""
    low, high = key_range(MODES[layer], spans)
    out = torch.empty(q.shape[:2], dtype=torch.float64)
    for span in spans:
        keys, _ = gather(cache, layer, span, span.start + span.row_count)
        for row in range(span.first_row, span.first_row + span.row_count):
            seen = keys[int(low[row]) : int(high[row]), 0].double().cpu()
            out[row] = (q[row].double().cpu() @ seen.T * scale).logsumexp(-1)
    return out


def compare(
    backend: TritonMla,
    layers: tuple[int, ...],
    spans: list[Span],
    q: torch.Tensor,
    scale: float,
    limit: float,
) -> float:
    """Output and log-sum-exp against fp64; the largest error, as a part of the largest value."""
    plan, worst, cache = backend.plan(spans), 0.0, backend.cache
    for layer in layers:
        out, lse = backend.run_with_lse(plan, layer, q)
        expected = attention_ref(cache, layer, MODES[layer], spans, q.cpu(), scale)
        found = lse_ref(cache, layer, spans, q, scale)
        for own, other in ((out, expected), (lse, found)):
            error = (own.double().cpu() - other).abs().max() / other.abs().max()
            worst = max(worst, float(error))
    assert worst < limit, worst
    return worst


def queries(spans: list[Span], heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    rows = sum(span.row_count for span in spans)
    return torch.randn(rows, heads, width, device=DEVICE).to(dtype)


def case(
    rank: int,
    rope: int,
    heads: int,
    layout: str,
    dtype: torch.dtype,
    tiles: Tiles | None,
    layers: tuple[int, ...],
    page: int = 16,
) -> None:
    cache, spans = build(BATCH, rank, rope, page, layout)
    scale = 2 * (rank + rope) ** -0.5
    backend = TritonMla(cache, heads, MODES, scale, dtype=dtype, tiles=tiles)
    q = queries(spans, heads, rank + rope, dtype)
    limit = 1e-4 if dtype == torch.float32 else 1e-2
    worst = compare(backend, layers, spans, q, scale, limit)
    print(f"{rank}+{rope} {heads} heads {layout} {dtype}: {worst:.1e}")


def check_all_modes_match_fp64() -> None:
    case(40, 6, 6, "float32", torch.float32, SMALL, (0, 1, 2, 3), page=5)


def check_layouts() -> None:
    """fp8 with two scales a token; bf16 with tiles that no row fills."""
    case(130, 16, 4, "fp8_ds_mla", torch.bfloat16, SMALL, (0,))
    case(24, 16, 20, "bfloat16", torch.bfloat16, Tiles(32, 32, 8, 4, 1), (3,))


def check_rows_stand_alone() -> None:
    """A row has the same bits in a batch, alone in its span, in parts of any size and, when causal,
    run by itself."""
    cache, spans = build(BATCH, 24, 8, 16, "float32")
    backend = TritonMla(cache, 6, MODES, 0.3, tiles=SMALL)
    q = queries(spans, 6, 32, torch.float32)
    plan = backend.plan(spans)
    for layer in (0, 1):
        out = backend.run(plan, layer, q)
        for kind, keys in sizes(SMALL).items():
            other = cut(TritonMla(cache, 6, MODES, 0.3, tiles=SMALL), keys)
            assert torch.equal(other.run(other.plan(spans), layer, q), out), kind
        for span in spans:
            rows = slice(span.first_row, span.first_row + span.row_count)
            only = backend.plan([Span(span.table, span.start, 0, span.row_count)])
            assert torch.equal(backend.run(only, layer, q[rows]), out[rows])
            if MODES[layer].causal and span.row_count > 1:
                single = backend.plan([Span(span.table, span.start + 1, 0, 1)])
                row = span.first_row + 1
                assert torch.equal(backend.run(single, layer, q[row : row + 1])[0], out[row])


def check_words_are_refilled() -> None:
    """Words of fixed capacity, filled again for another step: the same as a plan of its own."""
    cache, spans = build(BATCH, 24, 8, 16, "float32")
    backend = TritonMla(cache, 4, MODES, 0.2, tiles=SMALL)
    capacity, pages, rows = 6, 8, 40
    host = torch.empty(backend.words(capacity, rows, pages), dtype=torch.int32)
    for chosen in (spans, spans[1:3]):
        moved, first = [], 0
        for span in chosen:
            moved.append(Span(span.table, span.start, first, span.row_count))
            first += span.row_count
        q = queries(moved, 4, 32, torch.float32)
        backend.fill(host.numpy(), moved, capacity, pages)
        view = backend.view(host.to(DEVICE), capacity, pages, 0)
        assert torch.equal(backend.run(view, 0, q), backend.run(backend.plan(moved), 0, q))


def check_stored_rows_are_the_reference() -> None:
    """Norm, rotation and write in one kernel; rows with negative slots write nothing."""
    rows, positions = 9, torch.tensor([0, 3, 99, 7, 7, 31, 2, 64, 50], device=DEVICE)
    cos, sin = (x.to(DEVICE) for x in rope_tables(Rope(500.0, 100), 6, 100))
    slots = torch.tensor([5, 0, 47, -1, 12, 33, -1, 20, 8], device=DEVICE)
    kept, every = slots >= 0, torch.arange(3, device=DEVICE)
    for rank in (40, 200):
        down = torch.randn(rows, 2, 7 + rank + 6, device=DEVICE)[..., 7:]
        weights = torch.rand(2, rank, device=DEVICE) + 0.5
        for layout in ("float32", "bfloat16", "fp8_ds_mla"):
            geometry = LatentGeometry(3, rank, 6, 16, layout)
            own, other = LatentCache(geometry, 3, DEVICE), LatentCache(geometry, 3, DEVICE)
            store_latent(down, weights, 1e-6, (cos, sin), positions, slots, own, 1)
            for layer in range(2):
                normed = rms_norm_ref(down[:, layer, :rank], weights[layer], 1e-6)
                turned = rotate_ref(down[:, layer, None, rank:], cos[positions], sin[positions])
                latent = torch.cat((normed, turned[:, 0]), -1)
                other.write(1 + layer, latent[kept], slots[kept])
            found, wanted = (
                torch.stack([cache.gather(layer, every)[0] for layer in (1, 2)])
                for cache in (own, other)
            )
            # A value between two of a format may be rounded to either. The interpreter's fp8 loses
            # the carry where a value rounds up to a power of two.
            step = {"float32": 1e-6, "bfloat16": 2**-7, "fp8_ds_mla": 2**-3}[layout]
            far = (found - wanted).abs() > step * wanted.abs() + 1e-2 * step
            carries = layout == "fp8_ds_mla" and DEVICE == "cpu"
            assert float(far.float().mean()) <= (0.005 if carries else 0), layout
            assert not own.gather(0, every)[0].any()


def check_an_engine_runs_it() -> None:
    """A DeepSeek model with fp8 pages: the reference's logits, from prompt and block."""
    with tempfile.TemporaryDirectory() as folder:
        options = LATENT | {"first_k_dense_replace": 1, "num_hidden_layers": 2}
        write_model(Path(folder), "deepseek_v2", **options)
        found = []
        for name in ("TORCH_MLA", "TRITON_MLA"):
            engine = load_tiny(Path(folder), attention_backend=name, kv_dtype="fp8")
            table, ids = engine.allocate(24), random_ids(20)
            first, _ = run(engine, [(table, ids[:15], 0)])
            second, _ = run(engine, [(table, ids[15:], 15)])
            found.append(torch.cat(first + second))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def large(heads: int, layout: str, dtype: torch.dtype) -> None:
    """The sizes of DeepSeek-V2 and V3, with the kernel's own tiles, over several chunks of keys."""
    cache, spans = build([(3000, 8), (1023, 1), (0, 40)], 512, 64, 64, layout)
    scale = 2 * 576**-0.5
    backend = TritonMla(cache, heads, MODES, scale, dtype=dtype)
    q = queries(spans, heads, 576, dtype)
    limit = 1e-4 if dtype == torch.float32 else 1e-2
    worst = compare(backend, (0, 1, 2, 3), spans, q, scale, limit)
    print(f"512+64 {heads} heads {layout} {dtype}: {worst:.1e}")


def replay(layout: str) -> None:
    """A graph captured for four spans of eight rows, run for three of other lengths."""
    cache, spans = build([(100, 8), (2000, 8), (700, 8), (0, 8), (1500, 8)], 512, 64, 64, layout)
    backend = TritonMla(cache, 16, MODES, 0.08, dtype=torch.bfloat16)
    capacity, pages, width = 4, 40, 8
    host = torch.zeros(backend.words(capacity, capacity * width, pages), dtype=torch.int32)
    words = host.to(DEVICE)
    q = torch.zeros(capacity * width, 16, 576, device=DEVICE, dtype=torch.bfloat16)

    def filled(chosen: list[Span]) -> list[Span]:
        moved = [Span(s.table, s.start, i * width, width) for i, s in enumerate(chosen)]
        backend.fill(host.numpy(), moved, capacity, pages)
        words.copy_(host)
        q.copy_(torch.randn(q.shape, device=DEVICE))
        return moved

    filled(spans[:4])
    view = backend.view(words, capacity, pages, width)
    backend.run(view, 0, q)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.run(view, 0, q)
    for chosen in (spans[:4], spans[2:], spans[1:2]):
        moved = filled(chosen)
        graph.replay()
        rows = len(moved) * width
        assert torch.equal(out[:rows], backend.run(backend.plan(moved), 0, q[:rows]))


def kernels() -> None:
    """The small sizes, those of DeepSeek's models, and a graph."""
    check_all_modes_match_fp64()
    check_layouts()
    check_rows_stand_alone()
    check_words_are_refilled()
    check_stored_rows_are_the_reference()
    for layout, dtype in (
        ("bfloat16", torch.bfloat16),
        ("fp8_ds_mla", torch.bfloat16),
        ("float32", torch.float32),
    ):
        for heads in (16, 128):
            large(heads, layout, dtype)
    replay("bfloat16")
    replay("fp8_ds_mla")
    print("rows alone, refilled words and replays: equal")


def main() -> int:
    """On a GPU: the kernels, then a DeepSeek target with them."""
    failed = 0
    try:
        kernels()
    except Exception:  # the target is looked at in any case
        failed = 1
        traceback.print_exc()
    return failed + latent_gpu.main()


if __name__ == "__main__":
    raise SystemExit(main() > 0)
