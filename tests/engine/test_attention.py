"""Both backends against fp64, row independence of CPU_ATTN, and selection without substitutes."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import pytest
import torch

from engine.attention.base import AttentionBackend, LayerMode, Span
from engine.attention.flashinfer_attn import library
from engine.attention.mask import attention_ref, key_range
from engine.attention.resolution import Resolution
from engine.attention.select import (
    AttentionOptions,
    cuda_device,
    make_backend,
    resolve_attention,
)
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


def backend_of(
    name: str | None,
    cache: KVCache,
    heads: int,
    bucket: int = 0,
    modes: Sequence[LayerMode] = MODES,
) -> AttentionBackend:
    shape = cache.geometry
    dtype = str(shape.dtype).removeprefix("torch.")
    options = AttentionOptions(name, dtype, shape.page_tokens)
    resolution = resolve_attention(
        options,
        heads=heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        modes=modes,
        native=True,
    )
    return make_backend(resolution, cache, bucket)


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
    backend = backend_of(name, cache, heads, bucket)
    plan = backend.plan(spans)
    for layer, mode in enumerate(MODES):
        out = backend.run(plan, layer, q)
        expected = attention_ref(cache, layer, mode, spans, q)
        torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=1e-5)


def test_flex_attention_matches_fp64() -> None:
    """FLEX_ATTENTION, uncompiled as on the CPU; rows that no span has come back as zeros."""
    cache, spans = build([(0, 13), (40, 1), (9, 0), (37, 8)], 3, 64, 16, torch.bfloat16)
    q = torch.randn(24, 9, 64)
    backend = backend_of("FLEX_ATTENTION", cache, 9)
    assert backend.uncapturable and not backend.rows_independent
    plan = backend.plan(spans)
    for layer, mode in enumerate(MODES):
        out = backend.run(plan, layer, q)
        expected = attention_ref(cache, layer, mode, spans, q[:22])
        torch.testing.assert_close(out[:22].double(), expected, atol=3e-6, rtol=1e-5)
        assert not out[22:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_stand_alone(dtype: torch.dtype) -> None:
    """A row has the same bits in a batch, alone in its span, and, when causal, run by itself."""
    cache, spans = build(BATCH, 3, 64, 16, dtype)
    q = torch.randn(sum(span.row_count for span in spans), 9, 64)
    backend = backend_of("CPU_ATTN", cache, 9)
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
        backend = backend_of(name, cache, 9)
        before = backend.run(backend.plan(spans), 0, q)
        slots = [spans[0].table.slot(position) for position in range(23, 32)]
        cache.k[0].view(-1, 3, 64)[slots] = torch.nan
        cache.v[0].view(-1, 3, 64)[slots] = torch.nan
        assert torch.equal(backend.run(backend.plan(spans), 0, q), before)


def test_strided_queries_and_reused_plan() -> None:
    cache, spans = build([(5, 4)], 3, 64, 16, torch.float32)
    fused = torch.randn(4, 15 * 64)
    q = fused[:, : 9 * 64].unflatten(1, (9, 64))
    backend = backend_of(None, cache, 9)
    plan = backend.plan(spans)
    first = backend.run(plan, 1, q)
    assert torch.equal(backend.run(plan, 1, q.contiguous()), first)


def test_key_range_follows_the_definition() -> None:
    _, spans = build([(3, 4)], 1, 8, 4, torch.float32)
    low, high = key_range(LayerMode(causal=False, window=3), spans)
    assert (low.tolist(), high.tolist()) == ([1, 2, 3, 4], [6, 7, 7, 7])
    low, high = key_range(LayerMode(window=3), spans)
    assert (low.tolist(), high.tolist()) == ([1, 2, 3, 4], [4, 5, 6, 7])


def chosen(
    name: str | None = None,
    *,
    kv_dtype: str = "auto",
    dim: int = 64,
    heads: int = 9,
    modes: Sequence[LayerMode] = MODES,
    native: bool = True,
    graphs: str = "auto",
) -> Resolution:
    options = AttentionOptions(name, kv_dtype, 16, graphs)
    return resolve_attention(
        options, heads=heads, kv_heads=3, head_dim=dim, modes=modes, native=native
    )


def test_default_is_native_and_reported() -> None:
    report = chosen().report()
    assert (report.requested, report.policy, report.chosen) == ("", "auto", "CPU_ATTN")
    assert (report.kv_dtype, report.page_tokens, report.graph_mode) == ("float32", 16, "NONE")
    assert report.kv_bytes_per_token == 2 * len(MODES) * 3 * 64 * 4
    assert [c.name for c in report.candidates] == ["CPU_ATTN", "TORCH_SDPA"]
    assert chosen().graphs.reasons == ("no CUDA graphs on the cpu",)
    named = chosen("torch_sdpa", kv_dtype="bf16").report()
    assert (named.policy, named.chosen, named.kv_dtype) == ("name", "TORCH_SDPA", "bfloat16")


def test_refusals_are_reported_and_fall_through_only_when_unset() -> None:
    for name in (None, "", "auto"):
        resolution = chosen(name, native=False)
        assert resolution.chosen == "TORCH_SDPA"
        off = "native kernels are switched off for this service"
        assert resolution.candidates[0].reasons == (off,)
    with pytest.raises(
        BackendUnavailable, match=r"CPU_ATTN: \[.*switched off.*TORCH_SDPA: \[valid"
    ):
        chosen("CPU_ATTN", native=False)


def test_a_backend_of_the_vllm_engine_is_judged_and_refused() -> None:
    with pytest.raises(BackendUnavailable) as caught:
        chosen("B12X", modes=[LayerMode()])
    assert str(caught.value) == (
        "Attention backend B12X cannot run the target on cpu (head_size=64, kv=auto, causal, "
        "page=16): {B12X: [dtype not supported (float32; accepted: bfloat16), "
        "block_size not supported (16; accepted: 64), "
        "compute capability not supported (cpu; accepted: 12.0-12.1), "
        "not implemented by the native engine], CPU_ATTN: [valid], TORCH_SDPA: [valid]}"
    )


def test_unknown_names_list_everything() -> None:
    with pytest.raises(BackendUnavailable) as caught:
        chosen("FLASH")
    text = str(caught.value)
    assert text.startswith("Unknown attention backend 'FLASH' for the target on cpu, accepted: ")
    assert all(f" {name}," in text for name in ("auto", "inherit", "CPU_ATTN", "TRITON_ATTN"))
    assert text.endswith("{CPU_ATTN: [valid], TORCH_SDPA: [valid]}")
    with pytest.raises(BackendUnavailable, match="Nothing to inherit for the target on cpu"):
        chosen("inherit")


def test_limits_of_the_native_backends() -> None:
    both = r"CPU_ATTN: \[{0}\], TORCH_SDPA: \[{0}\]"
    kv = r"kv_cache_dtype not supported \(fp8; accepted: auto, float32, bfloat16\)"
    with pytest.raises(BackendUnavailable, match=both.format(kv)):
        chosen(kv_dtype="fp8")
    with pytest.raises(BackendUnavailable, match=r"head_size not supported \(60; accepted: multi"):
        chosen("CPU_ATTN", dim=60)
    assert chosen(dim=60).chosen == "TORCH_SDPA"
    wrong = "10 query heads are no multiple of 3 KV heads"
    with pytest.raises(BackendUnavailable, match=both.format(wrong)):
        chosen(heads=10)
    with pytest.raises(BackendUnavailable, match=r"window 0 is below 1 \[layer 1: causal, w"):
        chosen(modes=[LayerMode(), LayerMode(window=0)])
    graphs = "CUDA-graph mode FULL not possible: no CUDA graphs on the cpu"
    with pytest.raises(BackendUnavailable, match=both.format(graphs)):
        chosen(graphs="FULL")
    with pytest.raises(BackendUnavailable, match="unknown CUDA-graph mode 'all'; accepted: auto"):
        chosen(graphs="all")


def test_memory_must_agree_with_the_geometry() -> None:
    cache = KVCache(KVGeometry(len(MODES), 3, 64, 16, torch.bfloat16), 2)
    with pytest.raises(BackendUnavailable, match=r"768 a token and layer\), .* \(1536 a token"):
        make_backend(chosen(kv_dtype="float32"), cache)


def test_missing_kernels_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "available", lambda: False)
    monkeypatch.setattr(ops, "unavailable_reason", lambda: "no C compiler (cc not found)")
    resolution = chosen()
    assert resolution.chosen == "TORCH_SDPA"
    assert resolution.candidates[0].reasons == ("no C compiler (cc not found)",)


def on_a_gpu(
    patch: pytest.MonkeyPatch, capability: tuple[int, int], missing: Sequence[str] = ()
) -> None:
    """Stands in for what `cuda_device` asks of torch and of the installed packages."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
    patch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    patch.setattr("importlib.util.find_spec", lambda name: None if name in missing else object())


def on_gpu(
    name: str | None = None,
    *,
    kv_dtype: str = "auto",
    modes: Sequence[LayerMode] = MODES,
    query_tokens: int = 1,
    method: str = "",
) -> Resolution:
    return resolve_attention(
        AttentionOptions(name, kv_dtype, 16),
        heads=9,
        kv_heads=3,
        head_dim=64,
        modes=modes,
        native=True,
        role="draft" if method else "target",
        method=method,
        query_tokens=query_tokens,
        device="cuda",
    )


def test_a_gpu_takes_triton_and_captures_steps_of_one_width(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device is the real one, `auto` KV is bf16 there, fp8 KV is taken."""
    on_a_gpu(monkeypatch, (9, 0))
    assert cuda_device().name == "sm90" and not cuda_device().simulated
    found = on_gpu(query_tokens=8)
    assert (found.chosen, found.device, found.geometry.dtype) == ("TRITON_ATTN", "sm90", "bfloat16")
    assert (found.graphs.mode, found.graphs.reasons) == ("FULL_DECODE_ONLY", ())
    assert [c.name for c in found.candidates] == [
        "TRITON_ATTN", "FLASHINFER", "FLASH_ATTN", "FLEX_ATTENTION", "TORCH_SDPA",
    ]  # fmt: skip
    assert on_gpu(kv_dtype="fp8").geometry.dtype == "fp8_e4m3"
    draft = on_gpu(method="dflash", query_tokens=8, modes=[LayerMode(causal=False)])
    assert draft.graphs.mode == "FULL_DECODE_ONLY"
    flex = on_gpu("FLEX_ATTENTION", query_tokens=8)
    reason = "FLEX_ATTENTION: graph level NEVER, UNIFORM needed for 8 query tokens"
    assert (flex.graphs.mode, flex.graphs.reasons) == ("NONE", (reason,))


def test_what_a_gpu_machine_lacks_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, (8, 0), ["triton", "flashinfer"])
    found = on_gpu(modes=[LayerMode()])
    assert found.chosen == "FLASH_ATTN"
    missing = "the package flashinfer-python is not installed"
    assert found.candidates[1].reasons == (missing,)
    with pytest.raises(BackendUnavailable, match=r"TRITON_ATTN: \[the package triton is not inst"):
        on_gpu("TRITON_ATTN")
    with pytest.raises(BackendUnavailable, match=r"compute capability not supported \(sm80; acc"):
        on_gpu("CPU_ATTN")


def test_no_gpu_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match="no CUDA device is available"):
        on_gpu()
    with pytest.raises(BackendUnavailable, match="FLASHINFER: no CUDA device"):
        library()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(BackendUnavailable, match="flashinfer-python does not load"):
        library()


def test_triton_on_the_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendUnavailable, match="no GPU, and TRITON_INTERPRET=1 is not set"):
        chosen("TRITON_ATTN")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = chosen("TRITON_ATTN")
    assert found.chosen == "TRITON_ATTN" and found.geometry.dtype == "float32"
    assert found.graphs.reasons == ("no CUDA graphs on the cpu",)
