"""The layouts of latent KV: bytes, packing, and that memory and geometry agree."""

from __future__ import annotations

import pytest
import torch

from engine.attention.capabilities import Kind
from engine.attention.geometry import geometry_of
from engine.attention.mode import LayerMode
from engine.attention.request import AttentionShape, Latent
from engine.attention.select import AttentionOptions, make_backend, resolve_attention
from engine.errors import BackendUnavailable
from engine.kv.latent import LatentCache, LatentGeometry, pack_fp8, split_fp8, unpack_fp8
from engine.kv.pool import PagePool

SIZES = [(512, 64), (448, 64), (128, 32), (24, 8), (130, 2), (5, 6), (1, 2)]
LAYOUTS = ["float32", "bfloat16", "float16", "fp8_ds_mla"]


@pytest.mark.parametrize(("rank", "rope"), SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_are_those_of_the_resolver(rank: int, rope: int, layout: str) -> None:
    """AB-1: one number a token, whoever computes it, and it is what is allocated."""
    own = LatentGeometry(3, rank, rope, 4, layout)
    latent = Latent(rank, rope, nope=16)
    shape = AttentionShape(
        "", Kind.MLA, 8, 1, rank + rope, (LayerMode(),) * 3, "float32", latent=latent
    )
    resolved = geometry_of(shape, layout, 4, 0)
    assert own.token_bytes == resolved.token_bytes
    assert own.bytes_per_token == resolved.bytes_per_token
    cache = LatentCache(own, 5)
    assert cache.allocated_bytes == 5 * 4 * 3 * own.token_bytes
    resolved.check_allocated(5, cache.allocated_bytes)


def test_bytes_of_the_public_models() -> None:
    """The facts of DeepSeek-V3: 1152 bytes in bf16, 656 in its own fp8 layout."""
    assert LatentGeometry(1, 512, 64, 64, "bfloat16").token_bytes == 1152
    assert LatentGeometry(61, 512, 64, 64, "fp8_ds_mla").bytes_per_token == 61 * 656
    values = split_fp8(torch.zeros(1, 656, dtype=torch.uint8), 512, 64)
    assert [values.values.shape[1], values.scales.shape[1], values.rope.shape[1]] == [512, 4, 64]
    starts = [part.data_ptr() - values.values.data_ptr() for part in (values.scales, values.rope)]
    assert starts == [512, 528]


@pytest.mark.parametrize(("rank", "rope"), SIZES)
def test_packing_loses_no_more_than_the_formats_do(rank: int, rope: int) -> None:
    torch.manual_seed(rank)
    # Groups of very different size, zeros among them.
    size = torch.logspace(-6, 6, 9)[:, None]
    latent = torch.randn(9, rank + rope) * size
    latent[3, :rank] = 0
    back = unpack_fp8(pack_fp8(latent, rank, rope), rank, rope)
    assert torch.equal(back[:, rank:], latent[:, rank:].bfloat16().float())
    for first in range(0, rank, 128):
        group = slice(first, min(first + 128, rank))
        largest = latent[:, group].abs().amax(1, keepdim=True)
        # e4m3 has 3 bits behind the point; below 2**-6 of its scale steps are even.
        allowed = torch.maximum(latent[:, group].abs() / 16, largest / 448 * 2**-9) * 1.001
        assert ((back[:, group] - latent[:, group]).abs() <= allowed).all()
    assert torch.equal(back, back.bfloat16().float())


def test_what_was_packed_packs_to_the_same_bytes() -> None:
    """A copy of a page, or rows written again from what was read, change nothing."""
    torch.manual_seed(0)
    latent = torch.randn(40, 520)
    packed = pack_fp8(latent, 512, 8)
    again = pack_fp8(unpack_fp8(packed, 512, 8), 512, 8)
    assert torch.equal(unpack_fp8(again, 512, 8), unpack_fp8(packed, 512, 8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_written_rows_come_back_in_order_and_pages_copy(layout: str) -> None:
    geometry = LatentGeometry(2, 20, 6, 4, layout)
    cache, pool = LatentCache(geometry, 7), PagePool(7, 4)
    pool.allocate(5)
    table = pool.allocate(11)
    rows = torch.randn(11, 26)
    cache.write(1, rows, torch.tensor([table.slot(position) for position in range(11)]))
    keys, values = cache.gather(1, torch.tensor(table.pages))
    expected = rows
    if layout == "fp8_ds_mla":
        expected = unpack_fp8(pack_fp8(rows, 20, 6), 20, 6)
    else:
        expected = rows.to(getattr(torch, layout))
    assert torch.equal(keys[:11, 0], expected) and torch.equal(values[:11, 0], expected[:, :20])
    assert not cache.gather(0, torch.arange(7))[0].any()
    cache.copy_page(table.pages[0], 0)
    assert torch.equal(cache.gather(1, torch.tensor([0]))[0], keys[:4])


def test_another_layout_than_the_resolved_one_is_refused_with_both_numbers() -> None:
    """AB-1: allocated with one layout, viewed with another."""
    attention = resolve_attention(
        AttentionOptions(kv_dtype="fp8", page_tokens=16),
        heads=4,
        kv_heads=1,
        head_dim=576,
        modes=(LayerMode(),),
        native=False,
        latent=Latent(512, 64, 128),
    )
    assert (attention.geometry.dtype, attention.geometry.token_bytes) == ("fp8_ds_mla", 656)
    plain = LatentCache(LatentGeometry(1, 512, 64, 16, "bfloat16"), 4)
    with pytest.raises(BackendUnavailable, match=r"\(1152 a token and layer\), .* \(656 a token"):
        make_backend(attention, plain)
