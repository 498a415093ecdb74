"""Few pages, many short sessions: pages change hands in the middle of rounds, and none is lost."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.api import Item
from engine.runner import NativeEngine
from specwire.v1 import common_pb2, target_pb2
from target_svc.sessions import Session
from tests.engine.test_dflash import BLOCK, write_draft
from tests.engine.tiny import KERNELS, random_ids, write_llama
from tests.service.colocated_harness import Colocated, colocated_target, generate
from tests.service.target_harness import Peer, key, open_target, verify
from tests.service.test_draft_dspark import write_dspark

K, LONGEST = BLOCK - 1, 24
DRAFTS = {"dflash": write_draft, "dspark": write_dspark}


@pytest.fixture(params=DRAFTS)
async def crowded(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Colocated]:
    """9 pages of 16 tokens."""
    write_llama(tmp_path / "target")
    DRAFTS[request.param](tmp_path / "draft")
    pair, threads = (tmp_path / "target", tmp_path / "draft"), torch.get_num_threads()
    options: dict[str, Any] = {"kv_pages": 9, "max_length": 120, "preempt_idle_ms": 0}
    # Products this small gain nothing from threads, and lose much where cores are shared.
    options |= {"kernels": KERNELS[0], "threads": 1, "colocate": request.param}
    try:
        async with colocated_target(*pair, **options) as running:
            yield running
    finally:
        torch.set_num_threads(threads)


async def test_preemption_in_the_middle_of_a_round_loses_nothing(crowded: Colocated) -> None:
    """A session has its verdict and the next proposal; then others take its pages; it goes on."""
    prompt = random_ids(50)
    alone = await generate(crowded.peer(), prompt, 30, K, no_prefix_cache=True)
    peer, at = crowded.peer(), key(1)
    options = {"no_prefix_cache": True, "ignore_eos": True}
    colocated = target_pb2.ColocatedDraft(method="", then_propose=K)
    await peer.send(open_target(prompt, 30, at, colocated=colocated, **options))
    tokens, proposals, length, step, taken = [], [], len(prompt), 0, 0
    while True:
        verdict = await peer.verdict()
        tokens += verdict.tokens
        length = verdict.new_len
        if verdict.finish:
            break
        proposals.append(tuple(verdict.proposal.ids))
        before = crowded.app.metrics.value("preemptions")
        # Takes 7 of the 9 pages, and with them those of the session that waits for its verify.
        await generate(crowded.peer(), random_ids(100, seed=step), 10, K, no_prefix_cache=True)
        taken += crowded.app.metrics.value("preemptions") > before
        step += 1
        await peer.send(verify(step, length, list(proposals[-1]), at, then_propose=K))
    assert taken >= 5
    assert (tokens, proposals) == (alone.tokens, alone.proposals)
    await peer.send(target_pb2.CloseSession(key=at))
    assert (await peer.reply()).HasField("closed")
    await crowded.idle()


class Watch:
    """Looks at the pool between steps, before every batch that is built."""

    def __init__(self, running: Colocated) -> None:
        self.rounds, self.engine = 0, running.engine
        scheduler = running.app.scheduler
        assert scheduler is not None
        build, self._scheduler = scheduler._batches.build, scheduler

        def watched(ready: Iterable[Session], now: float) -> list[tuple[Session, Item]]:
            self.look(self.engine)
            return build(ready, now)

        scheduler._batches.build = watched  # type: ignore[method-assign]

    def look(self, engine: NativeEngine) -> None:
        self.rounds += 1
        pool, stats = engine._pool, engine.stats()
        tables = [s.table for s in self._scheduler.sessions if s.table is not None]
        held = {page for table in tables for page in table.pages}
        assert stats.free + len(held) == stats.total, "pages are neither free nor used"
        engine.check_integrity()
        assert len(pool.index) <= stats.total


class Churn:
    """Short sessions of few prompts, each checked against what it must say."""

    def __init__(self, running: Colocated, seed: int) -> None:
        self.running, self.chance = running, random.Random(seed)
        self.texts: list[tuple[list[int], int, float, list[int]]] = []
        self.names = count(10**6)
        self.done = 0

    async def learn(self) -> None:
        for seed in range(5):
            prompt = random_ids(self.chance.randint(3, 50), seed=seed // 2)
            for temperature in (0.0, 1.0):
                options = {"temperature": temperature, "no_prefix_cache": True}
                found = await generate(
                    self.running.peer(), prompt, LONGEST, 0, seed=seed, **options
                )
                self.texts.append((prompt, seed, temperature, found.tokens))

    async def client(self, watch: Watch, rounds: int) -> None:
        peer = self.running.peer()
        while watch.rounds < rounds:
            await self.session(peer)
        await peer.call.done_writing()

    async def session(self, peer: Peer) -> None:
        chance, at = self.chance, key(next(self.names))
        prompt, seed, temperature, expected = chance.choice(self.texts)
        new_tokens, k = chance.randint(1, LONGEST), chance.choice((0, 1, K, K, K + 3))
        colocated = target_pb2.ColocatedDraft(then_propose=k) if chance.random() < 0.8 else None
        await peer.send(
            open_target(
                prompt,
                new_tokens,
                at,
                sampling=common_pb2.Sampling(temperature=temperature, seed=seed),
                ignore_eos=True,
                colocated=colocated,
                no_prefix_cache=chance.random() < 0.2,
            )
        )
        verdict, tokens, step = await patient(peer), [], 0
        while True:
            tokens += verdict.tokens
            assert tokens == expected[: len(tokens)]
            if verdict.finish or chance.random() < 0.03:
                break  # some leave early
            step += 1
            if chance.random() < 0.1 and len(tokens) > 2:  # and some go back
                del tokens[-1:]
            ids = list(verdict.proposal.ids) if verdict.new_len == len(prompt) + len(tokens) else []
            then = k if colocated is not None else 0
            base = len(prompt) + len(tokens)
            await peer.send(verify(step, base, ids, at, then_propose=then))
            verdict = await patient(peer)
        await peer.send(target_pb2.CloseSession(key=at))
        assert (await peer.reply(60.0)).HasField("closed")
        self.done += 1


async def patient(peer: Peer) -> target_pb2.Verdict:
    """Sessions behind others wait for their pages."""
    reply = await peer.reply(60.0)
    assert reply.HasField("verdict"), reply
    return reply.verdict


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def churn(running: Colocated, rounds: int) -> None:
    churning = Churn(running, seed=rounds)
    await churning.learn()
    watch = Watch(running)
    before = 0
    for end in (rounds // 2, rounds):
        async with asyncio.TaskGroup() as group:
            for _ in range(7):
                group.create_task(churning.client(watch, end))
        await running.idle()
        before = before or resident_bytes()
    assert watch.rounds >= rounds and churning.done > rounds // 40
    assert running.app.metrics.value("preemptions") > 0
    assert running.app.metrics.registry.get_sample_value(
        "specwire_target_tokens_total", {"source": "draft"}
    )
    # Nothing is kept of what has gone: half of all rounds, and no more memory.
    assert resident_bytes() - before < 16 * 2**20
    assert running.stats().tables == 0 and running.stats().free == running.stats().total


async def test_short_sessions_churn(crowded: Colocated) -> None:
    await churn(crowded, 500)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_short_sessions_churn_for_20000_rounds(crowded: Colocated) -> None:
    await churn(crowded, 20_000)
