"""Checks of TRITON_ATTN over parts of every size. Run under the interpreter by
test_attention_parts.py; they import triton, so a test process must not."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.attention.mask import attention_ref
from engine.attention.triton_attn import TritonAttention
from tests.engine.attention_checks import MODES, SMALL, build, error, queries
from tests.engine.attention_parts import cut, sizes


def check_tiles_of_few_rows() -> None:
    """Steps of one token, over parts of every kind that `_finish` adds up and over everything: the
    same bits from all of them, and counters as they were."""
    heads, dim, page = 3, 32, 16
    batch = [(40, 1), (0, 1), (50, 0), (263, 1)]
    cache, spans = build(batch, 1, dim, page, torch.float32)
    q = queries(spans, heads, dim, torch.float32)
    tiles, pages = replace(SMALL, rows=32), 17
    found: dict[int, list[Tensor]] = {}
    for kind, keys in sizes(tiles).items():
        outs = []
        for few_rows in (16, 32):
            backend = TritonAttention(cache, heads, MODES, torch.float32, tiles, few_rows=few_rows)
            cut(backend, keys)
            words = np.zeros(backend.words(4, 4, pages), np.int32)
            backend.fill(words, spans, 4, pages)
            plan = backend.view(torch.from_numpy(words), 4, pages, 1)
            assert plan.rows == few_rows
            outs.append([backend.run(plan, layer, q) for layer in (0, 4)])
            pairs = zip(outs[-1], found.setdefault(few_rows, outs[-1]), strict=True)
            assert all(torch.equal(out, first) for out, first in pairs), (kind, few_rows)
            assert not bool(plan.arrived.any()) and bool(plan.finish) == bool(keys)
        for layer, few, many in zip((0, 4), *outs, strict=True):
            wanted = attention_ref(cache, layer, MODES[layer], spans, q)
            assert error(few, wanted) < 1e-5, (kind, layer)
            assert error(few, many) < 1e-6, (kind, layer)


def check_parts_of_every_size() -> None:
    """Random spans, also of one token by themselves, in trees of chunks of 8 and 16 units: every
    kind of part gives the same bits, and those are right."""
    rng, heads = random.Random(4), 5
    for units, layer, dim in ((8, 1, 32), (8, 4, 32), (16, 0, 80)):
        tiles = replace(SMALL, chunk=units)
        chunk = units * tiles.keys
        ends = [2 * chunk + rng.randint(1, 99), chunk + rng.randint(1, 99), rng.randint(1, 9)]
        widths = [1, rng.randint(2, 9), 1]
        batch = [
            (end - min(end, rows), min(end, rows)) for end, rows in zip(ends, widths, strict=True)
        ]
        cache, spans = build(batch, 1, dim, 16, torch.float32)
        q = queries(spans, heads, dim, torch.float32)
        wanted = attention_ref(cache, layer, MODES[layer], spans, q)
        outs: list[Tensor] = []
        for keys in sizes(tiles).values():
            # One processor: a combining program has all rows of a tile.
            backend = cut(TritonAttention(cache, heads, MODES, torch.float32, tiles, 1), keys)
            outs.append(backend.run(backend.plan(spans), layer, q))
            alone = replace(spans[0], first_row=0)
            words = np.zeros(backend.words(1, 1, 99), np.int32)
            backend.fill(words, [alone], 1, 99)
            plan = backend.view(torch.from_numpy(words), 1, 99, 1)
            assert plan.finish == 8 * bool(keys)
            outs.append(torch.cat([backend.run(plan, layer, q[:1]), outs[0][1:]]))
        assert error(outs[0], wanted) < 1e-5, (units, layer)
        assert all(torch.equal(out, outs[0]) for out in outs), (units, layer, ends)
