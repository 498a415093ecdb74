"""The n-gram index against a naive search of the whole text."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_svc.methods.base import REASON_CAPACITY, REASON_NO_MATCH, Request
from draft_svc.methods.ngram import MATCH_LIMIT, NgramIndex, NgramMethod
from engine.api import Sampling


def naive_lookup(ids: Sequence[int], k: int, min_n: int, max_n: int) -> tuple[int, ...]:
    for n in range(min(max_n, len(ids)), min_n - 1, -1):
        suffix = list(ids[-n:])
        for end in range(len(ids) - 1, n - 1, -1):
            if list(ids[end - n : end]) == suffix:
                text = list(ids)
                for offset in range(k):
                    text.append(text[end + offset])
                return tuple(text[len(ids) :])
    return ()


small_text = st.lists(st.integers(0, 3), max_size=40)


@given(ids=small_text, k=st.integers(1, 9), min_n=st.integers(1, 3), extra=st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_lookup_equals_a_naive_search(ids: list[int], k: int, min_n: int, extra: int) -> None:
    index = NgramIndex(min_n, min_n + extra, ids)
    assert index.lookup(k)[1] == naive_lookup(ids, k, min_n, min_n + extra)


@given(moves=st.lists(st.tuples(st.integers(0, 12), small_text), max_size=12))
@settings(max_examples=200, deadline=None)
def test_truncation_leaves_what_a_fresh_index_has(moves: list[tuple[int, list[int]]]) -> None:
    index, ids = NgramIndex(1, 3), []
    for back, tokens in moves:
        keep = max(len(ids) - back, 0)
        index.truncate(keep)
        index.extend(tokens)
        ids = ids[:keep] + tokens
        assert index.ids == ids
        assert index.lookup(5) == NgramIndex(1, 3, ids).lookup(5)
        assert index.lookup(5)[1] == naive_lookup(ids, 5, 1, 3)
    index.truncate(0)
    assert index._ends == {} and index._replaced == []


def test_the_longest_and_then_the_latest_match_wins() -> None:
    # [8, 9] was followed by 1 and later by 2; [7, 8, 9] only by 1.
    ids = [7, 8, 9, 1, 5, 8, 9, 2, 6, 7, 8, 9]
    assert NgramIndex(2, 3, ids).lookup(2)[1] == (1, 5)
    assert NgramIndex(2, 2, ids).lookup(2)[1] == (2, 6)


def test_a_repeating_text_is_continued_beyond_its_end() -> None:
    assert NgramIndex(1, 4, [5, 1, 2, 1, 2]).lookup(5)[1] == (1, 2, 1, 2, 1)


def test_no_match_says_so() -> None:
    method = NgramMethod(min_n=2, max_n=4, max_draft_tokens=7)
    context = method.open([1, 2, 3], Sampling())
    (draft,) = method.propose([Request(context, 3)])
    assert draft.ids == () and draft.reason == REASON_NO_MATCH


def test_a_round_on_a_long_context_is_cheap() -> None:
    method = NgramMethod(min_n=2, max_n=4, max_draft_tokens=7)
    context = method.open([i * i % 997 for i in range(8192)], Sampling())
    best = float("inf")
    for token in range(50):
        began = time.perf_counter()
        method.update(context, 8192 + token, [token % 7], ())
        method.propose([Request(context, 7)])
        best = min(best, time.perf_counter() - began)
    assert best < 0.2e-3


@pytest.mark.parametrize("keep", [0, 3, 5])
def test_update_forgets_what_is_beyond_keep(keep: int) -> None:
    method = NgramMethod(min_n=1, max_n=2, max_draft_tokens=7)
    context = method.open([1, 2, 1, 2, 3], Sampling())
    method.update(context, keep, [1, 2], ())
    assert context.ids == [*[1, 2, 1, 2, 3][:keep], 1, 2]


@given(ids=small_text, min_n=st.integers(1, 3))
def test_the_match_length_is_how_far_both_ends_agree(ids: list[int], min_n: int) -> None:
    index = NgramIndex(min_n, min_n + 1, ids)
    length, found = index.lookup(1)
    assert bool(length) == bool(found)
    if length:
        assert min_n <= length <= MATCH_LIMIT
        ends = [e for e in range(length, len(ids)) if ids[e - length : e] == ids[-length:]]
        # One of the earlier occurrences goes back exactly that far, and `found` follows it.
        assert any(
            found[0] == ids[end]
            and (length in (end, MATCH_LIMIT) or ids[end - length - 1] != ids[-length - 1])
            for end in ends
        )


def test_what_is_beyond_the_limit_is_counted_and_not_kept() -> None:
    """DF-41: no proposal past the drafter's own length, and memory is bounded."""
    method = NgramMethod(min_n=1, max_n=2, max_draft_tokens=3, max_length=8)
    context = method.open([1, 2, 3] * 4, Sampling())
    assert len(context.ids) == 8 and context.length == 12
    assert method.propose([Request(context, 3)])[0].reason == REASON_CAPACITY
    method.update(context, 10, [1, 2], ())
    assert context.length == 12 and len(context.ids) == 8
    method.update(context, 6, [1], ())
    assert context.length == 7 and context.ids == [1, 2, 3, 1, 2, 3, 1]
    assert method.propose([Request(context, 3)])[0].ids == (2, 3, 1)
    assert method.info.max_length_tokens == 8
