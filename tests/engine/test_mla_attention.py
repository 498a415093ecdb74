"""Backends of latent attention against fp64, and their selection without substitutes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.attention.base import AttentionBackend, LayerMode, Span
from engine.attention.capabilities import Kind
from engine.attention.devices import simulated
from engine.attention.mask import attention_ref
from engine.attention.outcome import Outcome, judge, kv_group
from engine.attention.request import AttentionShape, KVGroup, Latent, Request
from engine.attention.resolution import Resolution
from engine.attention.resolve import resolve
from engine.attention.select import AttentionOptions, make_backend, resolve_attention
from engine.errors import BackendUnavailable
from engine.kv.latent import LatentCache, LatentGeometry
from engine.kv.pool import PagePool
from tests.engine import interpreted

MODES = [
    LayerMode(),
    LayerMode(causal=False),
    LayerMode(window=7),
    LayerMode(causal=False, window=7),
]
# (start, rows) of a ragged batch: a prompt, single tokens, a block, a chunk across page edges.
BATCH = [(0, 13), (100, 1), (37, 8), (0, 1), (63, 17)]
LATENT = Latent(rank=40, rope=8, nope=24, softmax_factor=1.3)


def build(
    batch: Sequence[tuple[int, int]], latent: Latent, page_tokens: int, layout: str
) -> tuple[LatentCache, list[Span]]:
    torch.manual_seed(1)
    pages = sum(-(-(start + rows) // page_tokens) for start, rows in batch) + 2
    pool = PagePool(pages, page_tokens)
    cache = LatentCache(
        LatentGeometry(len(MODES), latent.rank, latent.rope, page_tokens, layout), pages
    )
    spans, first = [], 0
    for start, rows in batch:
        table = pool.allocate(start + rows)
        random.Random(1).shuffle(table.pages)
        spans.append(Span(table, start, first, rows))
        first += rows
    every = torch.arange(pages * page_tokens)
    for layer in range(len(MODES)):
        cache.write(layer, torch.randn(len(every), latent.rank + latent.rope), every)
    return cache, spans


def resolved(
    name: str | None = None, layout: str = "auto", latent: Latent = LATENT, page: int = 16
) -> Resolution:
    return resolve_attention(
        AttentionOptions(name, layout, page),
        heads=6,
        kv_heads=1,
        head_dim=latent.rank + latent.rope,
        modes=MODES,
        native=True,
        latent=latent,
    )


def backend_of(name: str, cache: LatentCache, bucket: int = 0) -> AttentionBackend:
    shape = cache.geometry
    return make_backend(resolved(name, shape.layout, page=shape.page_tokens), cache, bucket)


@pytest.mark.parametrize("bucket", [0, 64])
@pytest.mark.parametrize("layout", ["float32", "bfloat16", "fp8_ds_mla"])
@pytest.mark.parametrize("page_tokens", [16, 5])
def test_torch_matches_fp64(layout: str, page_tokens: int, bucket: int) -> None:
    cache, spans = build(BATCH, LATENT, page_tokens, layout)
    q = torch.randn(sum(span.row_count for span in spans), 6, 48)
    backend = backend_of("TORCH_MLA", cache, bucket)
    plan = backend.plan(spans)
    for layer, mode in enumerate(MODES):
        out = backend.run(plan, layer, q)
        expected = attention_ref(cache, layer, mode, spans, q, LATENT.scale)
        assert out.shape == (len(q), 6, 40)
        torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=1e-5)


def test_the_scale_is_that_of_the_queries_before_absorption() -> None:
    assert Latent(512, 64, 128).scale == pytest.approx(192**-0.5)
    assert LATENT.scale == pytest.approx(1.3 * 32**-0.5)


@pytest.mark.parametrize(
    ("device", "layout", "chosen", "token_bytes"),
    [
        ("sm80", "auto", "TRITON_MLA", 2 * 48),
        ("sm90", "fp8", "TRITON_MLA", 40 + 4 + 16),
        ("sm100", "fp8_ds_mla", "TRITON_MLA", 40 + 4 + 16),
        ("sm80", "fp8", "TORCH_MLA", 40 + 4 + 16),  # Triton converts fp8 from 8.9 on
        ("sm75", "auto", "TORCH_MLA", 2 * 48),
    ],
)
def test_our_own_engine_on_gpus(device: str, layout: str, chosen: str, token_bytes: int) -> None:
    shape = AttentionShape("", Kind.MLA, 16, 1, 48, tuple(MODES), "bfloat16", latent=LATENT)
    found = resolve(Request(shape, kv_dtype=layout, engine="native"), simulated(device))
    assert (found.chosen, found.geometry.token_bytes) == (chosen, token_bytes)
    missing = next(c for c in found.candidates if c.name == "FLASHINFER_MLA")
    assert "not implemented by the native engine" in missing.reasons


def beside(target: Resolution, shape: AttentionShape, **fields: Any) -> Outcome:
    """A draft in the target's process, on the target's device."""
    draft = Request(shape, role="draft", method="dspark", engine="native", **fields)
    group = kv_group(draft, target.request, colocated=True)
    return judge(replace(draft, kv_group=group), simulated(target.device), target)


def test_drafts_in_the_pages_of_a_latent_target() -> None:
    """AB-2, AB-7: a dense draft chooses for itself; a latent one with the target's attention takes
    its cache, and one that differs has a layout of its own under the same tables."""
    causal, open_ = (LayerMode(),), (LayerMode(False),)
    latent = AttentionShape("", Kind.MLA, 16, 1, 48, causal, "bfloat16", latent=LATENT)
    asked = Request(latent, kv_dtype="fp8", page_tokens=64, engine="native")
    target = resolve(asked, simulated("sm90"))
    dense = AttentionShape("", Kind.MHA, 8, 4, 64, open_, "bfloat16")
    found = beside(target, dense)
    assert (found.chosen, found.request.kv_group) == ("TRITON_ATTN", KVGroup.POOLED)
    assert found.resolution is not None and found.resolution.geometry.dtype == "bfloat16"
    refused = beside(target, dense, backend="inherit")
    assert "non-MLA not supported" in str(refused.refusal)
    same = beside(target, latent)
    assert (same.chosen, same.request.kv_group) == ("TRITON_MLA", KVGroup.SAME_CACHE)
    assert same.resolution is not None and same.resolution.geometry == target.geometry
    other = beside(target, latent, kv_dtype="bfloat16")
    assert "96 against 60 bytes a token" in str(other.refusal)
    block = beside(target, replace(latent, modes=open_), kv_dtype="bfloat16")
    assert (block.chosen, block.request.kv_group) == ("TRITON_MLA", KVGroup.POOLED)
    assert block.resolution is not None and block.resolution.geometry.token_bytes == 96
    assert block.resolution.geometry.page_tokens == target.geometry.page_tokens == 64


def test_the_cpu_runs_the_reference() -> None:
    found = resolved()
    assert "TRITON_INTERPRET=1 is not set" in str(found.candidates)
    assert (found.chosen, found.geometry.dtype) == ("TORCH_MLA", "float32")
    assert resolved(layout="fp8").geometry.dtype == "fp8_ds_mla"
    assert resolved(layout="fp8_ds_mla").geometry.token_bytes == 40 + 4 + 16


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("FLASHINFER_MLA", "not implemented by the native engine"),
        ("FLASHMLA", "not implemented by the native engine"),
        ("TORCH_SDPA", "MLA not supported"),
        ("CPU_ATTN", "MLA not supported"),
    ],
)
def test_a_name_that_cannot_be_had_is_refused(name: str, reason: str) -> None:
    with pytest.raises(BackendUnavailable, match=rf"{name}: \[[^\]]*{reason}"):
        resolved(name)


def test_dense_backends_name_why_not_latent_ones() -> None:
    """AB-2: nothing of a latent model's is carried to a dense one."""
    with pytest.raises(BackendUnavailable, match=r"TORCH_MLA: \[non-MLA not supported"):
        resolve_attention(
            AttentionOptions("TORCH_MLA"),
            heads=4,
            kv_heads=4,
            head_dim=16,
            modes=MODES,
            native=True,
        )


CHECKS = [
    "check_all_modes_match_fp64",
    "check_layouts",
    "check_rows_stand_alone",
    "check_words_are_refilled",
    "check_stored_rows_are_the_reference",
    "check_an_engine_runs_it",
]


@pytest.mark.timeout(300)
def test_triton_kernels_under_the_interpreter() -> None:
    outcomes = interpreted.run("tests.engine.mla_checks")
    assert outcomes == dict.fromkeys(CHECKS, "")
