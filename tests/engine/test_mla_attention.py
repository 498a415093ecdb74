"""Backends of latent attention against fp64, and their selection without substitutes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from engine.attention.base import AttentionBackend, LayerMode, Span
from engine.attention.mask import attention_ref
from engine.attention.request import Latent
from engine.attention.resolution import Resolution
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


def test_the_cpu_has_one_backend_for_latent_attention() -> None:
    found = resolved()
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
]


def test_triton_kernels_under_the_interpreter() -> None:
    outcomes = interpreted.run("tests.engine.mla_checks")
    assert outcomes == dict.fromkeys(CHECKS, "")
