"""Whether tiles of few rows give the bits of larger ones, on this very device.

A decode step's spans have fewer folded rows than a tile, and a smaller tile is less work. A product
of 16 rows is the same instruction as one of 32, but how sums over a row are laid out is the
compiler's affair, so that this is found out, not assumed.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.attention.base import Span
from engine.attention.kernels.schedule import Tiles
from engine.attention.mode import LayerMode
from engine.compiling import compile_first
from engine.kv.cache import KVCache, KVGeometry
from engine.kv.pool import PagePool

if TYPE_CHECKING:
    from engine.attention.triton_attn import TritonAttention

FEW = 16


@functools.cache
def equal_few_rows(
    kind: type[TritonAttention],
    geometry: KVGeometry,
    query_heads: int,
    dtype: torch.dtype,
    modes: tuple[LayerMode, ...],
    tiles: Tiles,
    device: torch.device,
) -> int:
    """FEW where its bits are those of `tiles.rows`, which is the answer otherwise. Tried once for
    each kernel and each of the distinct `modes`, with spans of one token over one unit, several
    units and several chunks."""
    if tiles.rows <= FEW:
        return tiles.rows
    page, chunk = geometry.page_tokens, tiles.keys * tiles.chunk
    contexts = [5, tiles.keys + 1, chunk - 3, 2 * chunk + tiles.keys + 7]
    pool = PagePool(sum(-(-context // page) for context in contexts), page)
    one = KVGeometry(len(modes), geometry.kv_heads, geometry.head_dim, page, geometry.dtype)
    cache = KVCache(one, pool.page_count, device)
    generator = torch.Generator(device).manual_seed(0)
    for tensor in (*cache.k, *cache.v):
        tensor.copy_(torch.randn(tensor.shape, generator=generator, device=device))
    shape = len(contexts), query_heads, geometry.head_dim
    q = torch.randn(shape, generator=generator, device=device).to(dtype)
    spans = [
        Span(pool.allocate(context), context - 1, row, 1) for row, context in enumerate(contexts)
    ]

    def run(rows: int) -> Tensor:
        backend = kind(cache, query_heads, modes, dtype, tiles, few_rows=rows)
        words, pages = backend.capacity(spans)
        host = torch.empty(words, dtype=torch.int32)
        backend.fill(host.numpy(), spans, len(spans), pages)
        plan = backend.view(host.to(device), len(spans), pages, width=1)
        return torch.stack([backend.run(plan, layer, q) for layer in range(len(modes))])

    def equal() -> bool:
        return torch.equal(run(FEW), run(tiles.rows))

    compile_first(device.type, equal)
    return FEW if equal() else tiles.rows
