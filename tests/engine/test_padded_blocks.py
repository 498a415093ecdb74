"""Blocks whose padding stands behind what their table holds: a short prompt, padded to the width of
exact steps, where a page holds less. The rows that count are right, and nothing beyond the pages is
read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.api import Item, Sampling
from engine.attention import flashinfer_attn
from engine.attention.base import LayerMode, Span
from engine.attention.gathered import gathered
from engine.attention.kernels.schedule import HEADER, Schedule, tiles_for
from engine.attention.mask import attention_ref
from engine.kernels.cpu import ops
from engine.kv.cache import KVCache
from engine.kv.pool import PagePool
from tests.engine.test_attention import MODES, backend_of, build
from tests.engine.tiny import load_tiny, random_ids, write_llama

PAGE, WIDTH, COUNT = 4, 8, 3


def padded_span() -> tuple[KVCache, Span]:
    """COUNT rows and so much padding behind them that the block is in two pages; it holds one."""
    cache, (_, _, span) = build([(0, 9), (0, 6), (0, COUNT)], 3, 64, PAGE, torch.float32)
    assert len(span.table.pages) == 1 and span.table.pages != [0]
    return cache, Span(span.table, 0, 0, WIDTH)


@pytest.mark.parametrize("name", ["CPU_ATTN", "TORCH_SDPA", "FLEX_ATTENTION"])
def test_rows_that_count_are_right(name: str) -> None:
    if name == "CPU_ATTN" and not ops.available():
        pytest.skip(ops.unavailable_reason())
    cache, span = padded_span()
    for layer in range(len(MODES)):  # of another session, which overflowed
        cache.k[layer][0], cache.v[layer][0] = torch.nan, torch.inf
    q = torch.randn(WIDTH, 9, 64)
    backend = backend_of(name, cache, 9)
    plan = backend.plan([span])
    own = Span(span.table, 0, 0, COUNT)
    for layer, mode in enumerate(MODES):
        if not mode.causal:
            continue
        out = backend.run(plan, layer, q)[:COUNT]
        expected = attention_ref(cache, layer, mode, [own], q[:COUNT])
        torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=1e-5)


def test_a_page_of_its_own_stands_in_for_what_is_not_held() -> None:
    cache, span = padded_span()
    (page,) = span.table.pages
    assert span.pages(PAGE) == [page, page]
    assert Span(span.table, 0, 0, COUNT).pages(PAGE) == [page]
    packed = gathered(cache, [span])
    slots = [page * PAGE + i for i in range(PAGE)] * 2
    assert packed.slots.tolist() == slots and packed.key_ends.tolist() == [0, WIDTH]
    schedule = Schedule(tiles_for(3, 64, half=True), 3, 4, 8)
    other = Span(PagePool(4, PAGE).allocate(6), 5, WIDTH, 1)
    for spans in ([span], [span, other]):
        words = np.full(schedule.words(2, 16, 3 * PAGE, 3), -7, np.int32)
        schedule.fill(words, spans, 2, 3, PAGE)
        assert words[HEADER : HEADER + 3].tolist() == [page, page, -7]


def test_flashinfer_is_told_of_as_many_pages_as_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[int]] = []

    class Wrapper:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def plan(self, *words: Any, **_: Any) -> None:
            told.extend(tensor.tolist() for tensor in words[:4])

    event = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    package = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setattr(flashinfer_attn, "library", lambda: package)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    cache, span = padded_span()
    other = Span(PagePool(4, PAGE).allocate(6), 5, WIDTH, 1)
    flashinfer_attn.FlashInferAttention(cache, 9, [LayerMode()]).plan([span, other])
    rows, page_ends, pages, last = told
    assert rows == [0, WIDTH, WIDTH + 1] and page_ends == [0, 2, 4] and last == [4, 2]
    assert pages == [*span.table.pages * 2, *other.table.pages]


@pytest.mark.parametrize("name", ["TORCH_SDPA", "FLEX_ATTENTION"])
def test_a_short_exact_session_in_small_pages(name: str, tmp_path: Path) -> None:
    """Up to its end, which is no multiple of a page: the same tokens as in large pages."""
    write_llama(tmp_path)
    prompt, sampling, found = random_ids(2), Sampling(temperature=0.0), []
    for page in (PAGE, 16):
        how = {"attention_backend": name, "page_tokens": page, "max_length": 14}
        engine = load_tiny(tmp_path, **how)
        assert not engine.rows_independent
        table, ids = engine.allocate(0), list(prompt)
        ids += engine.step([Item(table, ids, 0, 1, sampling)])[0].tokens
        while len(ids) < 14:
            start = len(ids) - 1
            drafts = [1] * min(5, engine.block_limit(start, True) - 1)
            item = Item(table, [ids[-1], *drafts], start, 1 + len(drafts), sampling)
            ids += engine.step([item])[0].tokens
        found.append(ids[:14])
        assert len(table.pages) <= -(-14 // page)
    assert found[0] == found[1]
