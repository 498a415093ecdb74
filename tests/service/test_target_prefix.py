"""Shared beginnings at a target: prefix hits, forks, and the rows that they leave out."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specwire.v1 import common_pb2, target_pb2
from tests.service.target_harness import (
    FakeDraft,
    Peer,
    Target,
    draft_server,
    key,
    open_target,
    push_to,
    target,
    verify,
)
from tests.service.test_target_rows import expected, joined
from tests.service.toy_engine import ToyEngine, continuation

PROMPT = list(range(10, 80))
TEXT = continuation(PROMPT, 40)
EXACT, FAST = common_pb2.EXACTNESS_EXACT, common_pb2.EXACTNESS_FAST


def dependent() -> ToyEngine:
    return ToyEngine(rows_independent=False)


async def opened(peer: Peer, ids: list[int], at: int, **fields: Any) -> target_pb2.Verdict:
    await peer.send(open_target(ids, at=key(at), **fields))
    return await peer.verdict()


async def cached(peer: Peer, ids: list[int], at: int, **fields: Any) -> int:
    """Cached tokens of a session that is opened and closed; its token must be right."""
    verdict = await opened(peer, ids, at, **fields)
    assert list(verdict.tokens) == continuation(ids, 1)
    await peer.send(target_pb2.CloseSession(key=key(at)))
    await peer.reply()
    return verdict.cached_tokens


def starts(service: Target) -> list[int]:
    return [start for items in service.engine.log for start, _, _ in items]


async def test_a_hit_equals_a_cold_run() -> None:
    """Whole pages of the common beginning are not run again; the last prompt token always is."""
    async with target() as service:
        peer = service.peer()
        assert await cached(peer, PROMPT, 1) == 0
        assert peer.load.pages_cached == 4 and peer.load.pages_free == 64
        service.engine.log.clear()
        longer = [*PROMPT, 7, 8, 9]
        assert await cached(peer, longer, 2) == 64
        assert starts(service) == [64]
        assert await cached(peer, PROMPT[:64], 3) == 48
        assert await cached(peer, [*PROMPT[:40], 3, *PROMPT[41:]], 4) == 32
        assert await cached(peer, [3, *PROMPT[1:]], 5) == 0
        assert await cached(peer, PROMPT[:1], 6) == 0
        assert service.count("prompt_tokens", source="cache") == 64 + 48 + 32
        await service.until_idle()


async def test_the_next_turn_of_a_chat_hits_what_was_generated() -> None:
    """Pages of accepted tokens are published too, also while the first session lives."""
    async with target() as service:
        peer = service.peer()
        await opened(peer, PROMPT, 1)
        await peer.send(verify(1, 71, [*TEXT[1:7], 0]))
        assert (await peer.verdict()).new_len == 78
        await peer.send(verify(2, 78, TEXT[8:14]))
        assert (await peer.verdict()).new_len == 85
        turn = [*PROMPT, *TEXT[:15], 5, 6, 7]
        # KV is [0, 84): five pages are full. The rejected draft is in none of them.
        assert await cached(peer, turn, 2) == 80


async def test_a_session_can_stay_out_of_the_cache() -> None:
    async with target() as service:
        peer = service.peer()
        assert await cached(peer, PROMPT, 1, no_prefix_cache=True) == 0
        assert peer.load.pages_cached == 0
        assert await cached(peer, PROMPT, 2) == 0
        assert await cached(peer, PROMPT, 3, no_prefix_cache=True) == 0
        # Log probabilities of the prompt need every row of it.
        assert await cached(peer, PROMPT, 4, prompt_logprobs=1) == 0
        assert await cached(peer, PROMPT, 5) == 64


async def test_pages_of_dependent_rows_are_hit_by_whole_chunks_only() -> None:
    """NU-9: the chunks lie on an absolute grid, of 32 here; the last one ends with the prompt, so
    another prompt would cut it elsewhere. What blocks computed is not taken for a chunk."""
    async with target(dependent()) as service:
        peer = service.peer()
        await opened(peer, PROMPT, 1)
        for step, have in enumerate((1, 9, 17, 25), start=1):
            await peer.send(verify(step, 70 + have, TEXT[have : have + 7]))
            assert (await peer.verdict()).new_len == 78 + have
        service.engine.log.clear()
        assert await cached(peer, [*PROMPT, *TEXT[:30]], 2) == 64
        assert await cached(peer, PROMPT[:64], 3) == 32
        assert await cached(peer, PROMPT[:65], 4) == 64
        # The whole prompts again, chunk by chunk from an edge of the grid.
        assert starts(service) == [64, 96, 32, 64]


async def test_exact_and_fast_pages_do_not_mix_where_rows_depend() -> None:
    loose = ToyEngine()
    loose.info = replace(loose.info, loose=True)
    for engine, expect in ((dependent(), 0), (ToyEngine(), 64), (loose, 0)):
        async with target(engine) as service:
            peer = service.peer()
            assert await cached(peer, PROMPT, 1, exactness=FAST) == 0
            assert await cached(peer, PROMPT, 2, exactness=EXACT) == expect
            assert await cached(peer, PROMPT, 3, exactness=FAST) == 64


async def test_going_back_into_a_published_page_leaves_it_whole() -> None:
    """The toy reads its pages: a page written by the wrong session would change the tokens."""
    async with target() as service:
        peer = service.peer()
        await opened(peer, PROMPT, 1)
        await opened(peer, PROMPT, 2)
        await peer.send(verify(1, 20, at=key(1)))  # into the second page, shared and published
        short = await peer.verdict()
        truth = continuation(PROMPT[:20], 12)
        assert list(short.tokens) == truth[:1]
        await peer.send(verify(2, 21, truth[1:7], at=key(1)), verify(1, 71, TEXT[1:5], at=key(2)))
        answers = {v.key.session_id: list(v.tokens) for v in [await peer.verdict() for _ in "ab"]}
        assert answers == {1: truth[1:8], 2: TEXT[1:6]}
        service.engine.check_integrity()
        assert await cached(peer, PROMPT, 3) == 64


ROWS = [
    # rows_from, row_window, page hit shortened to, first row sent
    (0, 0, 0, 0),
    (0, 1, 63, 63),
    (0, 10, 54, 54),
    (0, 512, 0, 0),
    (60, 512, 60, 60),
    (60, 2, 62, 62),
    (66, 512, 64, 66),
]


@pytest.mark.parametrize(("rows_from", "window", "hit", "first"), ROWS)
async def test_rows_after_a_hit(
    tmp_path: Path, rows_from: int, window: int, hit: int, first: int
) -> None:
    """DF-37, DF-38, WC-16: cached tokens have no rows. At most row_window of them are run again;
    what is older is skipped, and the verdict says where the rows begin. Unset: 512, a setting."""
    address = f"unix:{tmp_path / 'd.sock'}"
    async with draft_server(address, FakeDraft()) as draft, target() as service:
        peer = service.peer()
        await cached(peer, PROMPT, 1)
        fields = {"push_to": push_to(address), "rows_from": rows_from, "row_window": window}
        verdict = await opened(peer, PROMPT, 2, **fields)
        assert list(verdict.tokens) == TEXT[:1] and verdict.cached_tokens == hit
        assert (verdict.rows_start, verdict.rows_count) == (first, 70 - first)
        chunks = await draft.rows(70 - first)
        assert joined(chunks, 0) == (first, expected(first, 70, PROMPT))
        await peer.send(verify(1, 71, TEXT[1:3], at=key(2)))
        assert (await peer.verdict()).rows_start == 70


async def test_a_draft_that_has_its_rows_takes_nothing_from_the_hit(tmp_path: Path) -> None:
    """AB-22: the target's cache does not depend on whether a draft is attached."""
    address = f"unix:{tmp_path / 'd.sock'}"
    async with draft_server(address, FakeDraft()), target() as service:
        peer = service.peer()
        await cached(peer, PROMPT, 1, push_to=push_to(address))
        plain = await cached(peer, PROMPT, 2)
        assert plain == 64
        has_rows = {"push_to": push_to(address), "rows_from": plain}
        assert await cached(peer, PROMPT, 3, **has_rows) == plain


async def test_rows_after_a_hit_where_rows_depend(tmp_path: Path) -> None:
    """The hit is shortened to an edge of the grid: at most row_window tokens run again."""
    address = f"unix:{tmp_path / 'd.sock'}"
    async with draft_server(address, FakeDraft()), target(dependent()) as service:
        peer = service.peer()
        await cached(peer, PROMPT, 1)
        for number, (rows_from, window, hit) in enumerate(
            [(0, 512, 0), (40, 512, 32), (40, 20, 64), (0, 40, 32), (0, 10, 64)], start=2
        ):
            fields = {"push_to": push_to(address), "rows_from": rows_from, "row_window": window}
            verdict = await opened(peer, PROMPT, number, **fields)
            assert (verdict.cached_tokens, verdict.rows_start) == (hit, max(hit, rows_from))
            assert verdict.rows_start + verdict.rows_count == 70


@pytest.mark.parametrize("independent", [True, False])
async def test_forks_equal_sessions_of_their_own(independent: bool) -> None:
    """All in one frame: the prompt runs once, each child only what its own first token needs."""
    engine = ToyEngine(rows_independent=independent)
    async with target(engine) as service:
        peer = service.peer()
        opens = [
            open_target(
                PROMPT,
                at=key(n),
                sampling=common_pb2.Sampling(temperature=0.8, seed=n),
                fork_of=key(1) if n > 1 else None,
                no_prefix_cache=True,
            )
            for n in range(1, 6)
        ]
        await peer.send(*opens)
        verdicts = [await peer.verdict() for _ in opens]
        # A child runs its last token again; where rows depend, the chunk that it is in.
        shared = 69 if independent else 64
        assert [v.cached_tokens for v in verdicts] == [0, *[shared] * 4]
        ran = sum(len(ids) for items in engine.log for _, ids, _ in items)
        assert ran == 70 + 4 * (70 - shared)
        pages = engine.stats()
        assert pages.total - pages.free <= 5 + 4  # the last page is each one's own
        for verdict in verdicts:
            n = verdict.key.session_id
            truth = continuation(PROMPT, 9, n)
            assert list(verdict.tokens) == truth[:1]
            await peer.send(verify(1, 71, [*truth[1:4], 0], at=key(n)))
        for _ in verdicts:
            verdict = await peer.verdict()
            truth = continuation(PROMPT, 9, verdict.key.session_id)
            assert list(verdict.tokens) == truth[1:5]
        engine.check_integrity()


async def test_a_fork_without_its_parent_is_an_ordinary_open() -> None:
    """Gone, never there, of another prompt, itself, or closed while the child waited for it."""
    async with target() as service:
        peer, plain = service.peer(), {"no_prefix_cache": True}
        await opened(peer, PROMPT, 1, **plain)
        assert await cached(peer, PROMPT, 2, fork_of=key(99), **plain) == 0
        assert await cached(peer, [*PROMPT[:-1], 1], 3, fork_of=key(1), **plain) == 0
        assert await cached(peer, PROMPT, 4, fork_of=key(4), **plain) == 0
        assert await cached(peer, PROMPT, 5, fork_of=key(1, generation=2), **plain) == 0
        assert await cached(peer, PROMPT, 6, fork_of=key(1), prompt_logprobs=0, **plain) == 0
        assert await cached(peer, PROMPT, 7, fork_of=key(1), **plain) == 69
        await peer.send(verify(1, 30))  # the parent goes back into its prompt
        await peer.verdict()
        assert await cached(peer, PROMPT, 8, fork_of=key(1), **plain) <= 29
        service.engine.gate.clear()
        service.engine.entered.clear()
        await peer.send(open_target(PROMPT, at=key(10), **plain))
        await asyncio.to_thread(service.engine.entered.wait, 5)
        await peer.send(open_target(PROMPT, at=key(11), fork_of=key(10), **plain))
        await peer.send(target_pb2.CloseSession(key=key(10)))
        assert (await peer.reply()).HasField("closed")
        service.engine.gate.set()
        verdict = await peer.verdict()
        assert verdict.key == key(11) and list(verdict.tokens) == TEXT[:1]
        assert verdict.cached_tokens == 0


async def test_rows_of_a_fork(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'd.sock'}"
    async with draft_server(address, FakeDraft()) as draft, target() as service:
        peer = service.peer()
        await opened(peer, PROMPT, 1)
        verdict = await opened(
            peer, PROMPT, 2, fork_of=key(1), push_to=push_to(address), row_window=30
        )
        assert (verdict.cached_tokens, verdict.rows_start, verdict.rows_count) == (39, 39, 31)
        assert joined(await draft.rows(31), 0) == (39, expected(39, 70, PROMPT))
