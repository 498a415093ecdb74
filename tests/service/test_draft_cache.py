"""Context K/V across sessions: what a draft still has need not be sent again, and proposals are
those of a context that was built from every row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from draft_svc.coverage import Coverage, RowsRefused
from draft_svc.host import DraftHost
from draft_svc.loading import DEFAULT_DRAFT
from draft_svc.methods.base import (
    REASON_CATCHING_UP,
    REASON_PAGES,
    REASON_ROWS_MISSING,
    Request,
    RowBlock,
)
from draft_svc.methods.dflash import DFlashMethod
from draft_svc.methods.dflash_context import DFlashContext
from draft_svc.methods.hybrid import HybridMethod
from draft_svc.methods.ngram import NgramMethod
from engine.api import Sampling
from engine.models.dflash import Block
from engine.models.draft_loading import LoadedDraft, load_dflash
from engine.models.draft_options import DFlashOptions
from specwire.rpc import channel_options
from specwire.v1 import draft_pb2, draft_pb2_grpc
from tests.service.draft_peer import (
    LIMITS,
    TARGET,
    Link,
    advance_item,
    close_item,
    open_item,
    session_key,
)

pytestmark = pytest.mark.model

GREEDY = Sampling(temperature=0.0)
LIMITS_BIG = dataclasses.replace(LIMITS, max_sessions=80, rows_buffer_bytes=1 << 24)
PAGE = 16
Rows = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(scope="module")
def loaded() -> LoadedDraft:
    return load_dflash(DEFAULT_DRAFT, "default", DFlashOptions(page_count=64, page_tokens=PAGE))


@pytest.fixture
def method(loaded: LoadedDraft) -> Iterator[DFlashMethod]:
    yield DFlashMethod(loaded, max_draft_tokens=7, max_length=None, tokenizer_hash="")
    loaded.model.pool.check_integrity()
    stats = loaded.model.pool.stats()
    assert stats.tables == 0 and stats.free == stats.total


def text(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 40_000, (count,), generator=generator).tolist()


def rows_of(ids: Sequence[int]) -> Rows:
    """Rows that follow from the ids before and at each position, as a target's do."""
    rows = [
        torch.randn(2880, generator=torch.Generator().manual_seed(hash(tuple(ids[: p + 1]))))
        for p in range(len(ids))
    ]
    return torch.stack(rows).bfloat16().view(torch.uint16).numpy()


def direct(loaded: LoadedDraft, ids: Sequence[int], origin: int = 0) -> list[int]:
    """Seven tokens after `ids` from the rows of [origin, len(ids) - 1), one session alone."""
    model, start = loaded.model, len(ids) - 1
    table = model.pool.allocate(0)
    values = torch.from_numpy(rows_of(ids)[origin:start].copy()).view(torch.bfloat16)
    model.write_context(table, origin, values, origin)
    logits = model.propose_logits([Block(table, ids[-1], start, origin)])[0]
    tokens: list[int] = logits.argmax(-1).tolist()
    table.free()
    return tokens


def opened(
    method: DFlashMethod, ids: Sequence[int], target: str = "target"
) -> tuple[DFlashContext, int]:
    context = method.open(ids, GREEDY)
    return context, method.restore(context, target)[1]


def commit(method: DFlashMethod, context: DFlashContext, tokens: Sequence[int], have: int) -> None:
    """Commits tokens, with the rows from `have` to the new anchor."""
    ids = [*context.ids, *tokens]
    rows = rows_of(ids)[have : len(ids) - 1]
    method.update(context, len(context.ids), tokens, [RowBlock(have, rows)])


def ask(method: DFlashMethod, context: DFlashContext) -> list[int]:
    return list(method.propose([Request(context, 7)])[0].ids)


@pytest.mark.parametrize("closed", [True, False], ids=["ended", "live"])
def test_turn_two_proposes_what_a_cold_context_does(
    method: DFlashMethod, loaded: LoadedDraft, closed: bool
) -> None:
    """DF-13, DF-37: turn 1 of 100 tokens, turn 2 the same and 30 more, rows from `have` only."""
    first, have = opened(method, text(100, seed=1 + closed))
    assert have == 0
    commit(method, first, [5], 0)
    assert ask(method, first) == direct(loaded, first.ids)
    if closed:
        method.close(first)
    second, have = opened(method, [*first.ids, *text(30, seed=3)])
    assert have == 96  # whole pages of what had rows
    commit(method, second, [8], have)
    assert ask(method, second) == direct(loaded, second.ids)
    if not closed:
        commit(method, first, [6], 100)
        assert ask(method, first) == direct(loaded, first.ids)
        method.close(first)
    method.close(second)


@pytest.mark.parametrize("length", [PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1])
def test_the_last_committed_row_is_always_wanted(method: DFlashMethod, length: int) -> None:
    """The target runs the last prompt token again in any case, and sends its row."""
    ids = text(40, seed=5)
    first, _ = opened(method, ids)
    commit(method, first, [5], 0)
    method.propose([Request(first, 1)])
    second, have = opened(method, ids[:length])
    assert have == (length - 1) // PAGE * PAGE < length
    method.close(first)
    method.close(second)


def test_other_ids_targets_and_no_target_never_hit(method: DFlashMethod) -> None:
    ids = text(80, seed=6)
    first, _ = opened(method, ids)
    commit(method, first, [5], 0)
    ask(method, first)
    method.close(first)
    changed = [*ids]
    changed[20] += 1
    haves = {}
    for name, asked, target in (
        ("same", ids, "target"),
        ("changed", changed, "target"),
        ("target", ids, "another"),
        ("anonymous", ids, ""),
    ):
        context, haves[name] = opened(method, asked, target)
        method.close(context)
    assert haves == {"same": 64, "changed": 16, "target": 0, "anonymous": 0}
    # Rows of a target without a name are kept from everyone else.
    nameless, _ = opened(method, other := text(50, seed=7), "")
    commit(method, nameless, [5], 0)
    ask(method, nameless)
    method.close(nameless)
    context, have = opened(method, other)
    assert have == 0
    method.close(context)


def test_what_is_shared_is_never_written(method: DFlashMethod, loaded: LoadedDraft) -> None:
    ids = text(64, seed=8)
    first, _ = opened(method, ids)
    commit(method, first, [5], 0)
    ask(method, first)
    second, have = opened(method, [*ids, 9, 9])
    assert have == 64
    # Both go back into the shared pages and on another way; a third reads what is published.
    for context, token in ((first, 11), (second, 12)):
        keep = 40
        rest = [token] * 6
        kept = [*context.ids[:keep], *rest]
        rows = RowBlock(keep - 1, rows_of(kept)[keep - 1 : -1])
        method.update(context, keep, rest, [rows])
        assert ask(method, context) == direct(loaded, kept)
    third, have = opened(method, [*ids, 5, 5])
    assert have == 64
    commit(method, third, [7], have)
    assert ask(method, third) == direct(loaded, third.ids)
    for context in (first, second, third):
        method.close(context)


def test_the_least_recently_used_give_way(method: DFlashMethod, loaded: LoadedDraft) -> None:
    total = loaded.model.pool.stats().total * PAGE
    texts = [text(total // 5, seed=seed) for seed in range(20, 28)]
    for ids in texts:
        context, _ = opened(method, ids)
        commit(method, context, [5], 0)
        assert len(ask(method, context)) == 7
        method.close(context)
    haves = []
    for ids in (texts[0], texts[-1]):
        context, have = opened(method, ids)
        haves.append(have)
        method.close(context)
    assert haves[0] == 0 and haves[1] > 150


def test_rows_may_begin_behind_what_the_cache_had(
    method: DFlashMethod, loaded: LoadedDraft
) -> None:
    """DF-38: a target that runs fewer cached tokens again leaves a gap; the context starts late."""
    ids = text(70, seed=9)
    first, _ = opened(method, ids[:40])
    commit(method, first, [ids[40]], 0)
    ask(method, first)
    method.close(first)
    second, have = opened(method, ids)
    assert have == 32
    commit(method, second, [5], 50)
    assert second.origin == 50
    assert ask(method, second) == direct(loaded, second.ids, origin=50)
    method.close(second)


@pytest.mark.parametrize(("begin", "origin"), [(16, 16), (21, 32)])
def test_a_context_that_begins_late_is_shared_too(
    method: DFlashMethod, loaded: LoadedDraft, begin: int, origin: int
) -> None:
    """DF-37: what the target's cache had before this draft existed never gets rows; turn 2 goes on
    from those that came.
    """
    ids = text(70, seed=begin)
    late, _ = opened(method, ids)
    commit(method, late, [5], begin)
    assert late.origin == origin
    assert ask(method, late) == direct(loaded, late.ids, origin)
    method.close(late)
    other = [*ids]
    other[3] += 1  # before the rows begin, and yet another text
    context, have = opened(method, [*other, 5, 6])
    assert have == 0
    method.close(context)
    again = method.open([*late.ids, *text(9, seed=80)], GREEDY)
    end = origin + (70 - origin) // PAGE * PAGE
    assert method.restore(again, "target") == (origin, end)
    commit(method, again, [7], end)
    assert ask(method, again) == direct(loaded, again.ids, origin)
    # Rows from 0 on make a context of their own; the one that reaches further is found.
    fresh = method.open(ids, GREEDY)
    fresh.base = fresh.root = late.base
    commit(method, fresh, [5], 0)
    ask(method, fresh)
    third = method.open(again.ids, GREEDY)
    assert method.restore(third, "target")[0] == origin
    fourth = method.open([*ids, 5], GREEDY)
    assert method.restore(fourth, "target") == (0, 64)  # both reach 64: the longer one
    for context in (again, fresh, third, fourth):
        method.close(context)


def test_rows_of_many_sessions_are_written_together(
    loaded: LoadedDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = DFlashMethod(loaded, max_draft_tokens=3, max_length=None, tokenizer_hash="")
    contexts = [opened(method, text(9, seed=seed))[0] for seed in range(30)]
    sizes: list[int] = []
    write = loaded.model.write_contexts
    monkeypatch.setattr(
        loaded.model, "write_contexts", lambda writes: sizes.append(len(writes)) or write(writes)
    )
    for context in contexts:
        commit(method, context, [5], 0)
    assert not method.work() and sizes == [30]
    drafts = method.propose([Request(context, 3) for context in contexts])
    for context, draft in zip(contexts, drafts, strict=True):
        assert list(draft.ids) == direct(loaded, context.ids)[:3]
        method.close(context)


def test_a_long_prompts_rows_come_in_pieces(
    loaded: LoadedDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draft_svc.methods.dflash._FORWARD_ROWS", 32)
    method = DFlashMethod(loaded, max_draft_tokens=7, max_length=None, tokenizer_hash="")
    long, short = (opened(method, text(count, seed=count))[0] for count in (100, 20))
    commit(method, long, [5], 0)
    commit(method, short, [5], 0)
    drafts = method.propose([Request(long, 7), Request(short, 7)])
    assert drafts[0].reason == REASON_CATCHING_UP
    assert list(drafts[1].ids) == direct(loaded, short.ids)
    pieces = 1
    while method.work():
        pieces += 1
    assert pieces == 3  # 12 rows were written beside the short one's 20
    assert ask(method, long) == direct(loaded, long.ids)
    hoard = loaded.model.pool.allocate(loaded.model.pool.stats().free * PAGE)
    commit(method, long, [7] * 30, 100)
    assert not method.work()  # nothing to wait for: it is asked for again with the next proposal
    assert method.propose([Request(long, 7)])[0].reason == REASON_PAGES
    hoard.free()
    method.propose([Request(long, 7)])
    assert ask(method, long) == direct(loaded, long.ids)
    method.close(long)
    method.close(short)


def test_rows_without_pages_are_bounded(
    loaded: LoadedDraft, method: DFlashMethod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that gets no pages keeps its newest rows, and begins late when it gets some."""
    monkeypatch.setattr("draft_svc.methods.dflash_context._PENDING_ROWS", 24)
    hoard = loaded.model.pool.allocate(loaded.model.pool.stats().free * PAGE)
    context, _ = opened(method, text(40, seed=60))
    commit(method, context, [5], 0)
    for token in range(3):
        commit(method, context, [token] * 10, len(context.ids) - 1)
        assert not method.work()
    assert context.pending_rows == 20
    hoard.free()
    assert ask(method, context) == direct(loaded, context.ids, origin=50)
    method.close(context)


def test_a_hybrid_has_what_its_drafter_has(method: DFlashMethod, loaded: LoadedDraft) -> None:
    lookup = NgramMethod(min_n=2, max_n=4, max_draft_tokens=7)
    hybrid = HybridMethod(lookup, method, owns_neural=True)
    ids = text(50, seed=61)
    first, _ = opened(method, ids)
    commit(method, first, [5], 0)
    ask(method, first)
    method.close(first)
    context = hybrid.open([*ids, 5, 6], GREEDY)
    assert hybrid.restore(context, "target") == (0, 48)
    known = [*ids, 5, 6, 7]
    hybrid.update(context, 52, [7], [RowBlock(48, rows_of(known)[48:52])])
    (draft,) = hybrid.propose([Request(context, 7)])
    assert draft.source == "dflash" and list(draft.ids) == direct(loaded, known)
    hybrid.close(context)


def test_coverage_after_a_restore() -> None:
    coverage = Coverage(40, 1 << 20)
    coverage.restore(0, 32)
    rows = np.zeros((8, 1), dtype=np.uint16)
    assert coverage.offer(0, RowBlock(32, rows)) == []
    (taken,) = coverage.confirm(0, 40, 41)
    assert (taken.start, taken.end, coverage.start, coverage.end) == (32, 40, 0, 40)
    late = Coverage(40, 1 << 20)
    late.restore(0, 16)
    late.offer(0, RowBlock(24, rows))
    late.offer(0, RowBlock(32, rows))
    with pytest.raises(RowsRefused, match="gap"):
        late.offer(0, RowBlock(41, rows))
    assert [(b.start, b.end) for b in late.confirm(0, 40, 41)] == [(24, 32), (32, 40)]
    assert (late.start, late.end) == (24, 40)
    with pytest.raises(RowsRefused, match="gap"):  # a hole is a hole from here on
        late.offer(1, RowBlock(44, rows))


async def test_a_chat_of_two_turns_over_grpc(loaded: LoadedDraft, tmp_path: Path) -> None:
    method = DFlashMethod(loaded, max_draft_tokens=7, max_length=None, tokenizer_hash="")
    host = DraftHost(
        lambda: {"dflash": method},
        address=f"unix:{tmp_path}/draft.sock",
        limits=LIMITS_BIG,
        default_method="dflash",
    )
    async with (
        host,
        grpc.aio.insecure_channel(host.address, options=channel_options(link=True)) as channel,
    ):
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        info = (await stub.GetInfo(draft_pb2.DraftServiceGetInfoRequest())).drafters[0]
        assert {(c.rows, c.sessions) for c in info.costs} == {(1, 1), (7, 1), (1, 4), (7, 4)}
        link, push = Link(stub), stub.PushFeatures()

        async def turn(number: int, ids: list[int]) -> tuple[int, list[int]]:
            key = session_key(number)
            item = open_item(key, ids, "dflash", target_fingerprint=info.target_fingerprint)
            item.open.sampling.temperature = 0.0
            have = (await link.ask(item)).opened.have_rows
            rows = rows_of([*ids, 5])[have : len(ids)]
            chunk = draft_pb2.FeatureChunk(
                key=key, step_id=0, start=have, count=len(rows), rows=rows.tobytes()
            )
            await push.write(
                draft_pb2.PushFeaturesRequest(target_incarnation=TARGET, chunks=[chunk])
            )
            assert not (await push.read()).acks[0].HasField("error")
            reply = await link.ask(advance_item(key, 0, len(ids), [5], 7, rows_count=len(rows)))
            await link.ask(close_item(key))
            return have, list(reply.proposal.ids)

        first = text(60, seed=50)
        assert await turn(1, first) == (0, direct(loaded, [*first, 5]))
        second = [*first, 5, *text(20, seed=51)]
        assert await turn(2, second) == (48, direct(loaded, [*second, 5]))
        assert host.metrics.value("cached_rows", method="dflash") == 48
        # Without the rows between it and the anchor, what the cache has is of no use yet.
        key = session_key(3)
        item = open_item(key, second, "dflash", target_fingerprint=info.target_fingerprint)
        assert (await link.ask(item)).opened.have_rows == 80
        reply = await link.ask(advance_item(key, 0, len(second), [5], 7, rows_count=0))
        assert reply.proposal.reason == REASON_ROWS_MISSING
    loaded.model.pool.check_integrity()
    assert loaded.model.pool.stats().tables == 0
