"""Shared pages and preemption change no bit: the native engine under the target service, and a toy
whose every token shows in which shape the positions before it were computed.

Margins (the top logit minus the second, fp32) are compared as they are: where the shape of a
recomputation differed, they would differ in the last bits long before a token does.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from engine.kv.pool import PoolStats
from engine.runner import NativeEngine
from specwire.v1 import common_pb2, target_pb2
from tests.engine.tiny import KERNELS, VOCAB, load_tiny, random_ids, write_llama
from tests.service.target_harness import Target, key, open_target, target, verify
from tests.service.toy_engine import ShapeEngine

Output = list[tuple[int, float]]
COUNT = 40
KINDS = [*KERNELS, "shapes"]
IDS = itertools.count(100)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("native")
    write_llama(path)
    return path


def load(directory: Path, kernels: str, pages: int) -> NativeEngine:
    return load_tiny(
        directory,
        kernels,
        kv_pages=pages,
        page_tokens=8,
        prefill_chunk=16,
        kv_bucket=32,
        max_length=min(160, pages * 8),
    )


async def generate(
    service: Target, number: int, prompt: list[int], hint: Output | None = None, **fields: Any
) -> Output:
    """Tokens and margins of one session; `hint` are those of an earlier run, to draft from."""
    peer, dice = service.peer(), random.Random(number)
    at = key(next(IDS))
    sampling = common_pb2.Sampling(temperature=0.8, seed=number)
    await peer.send(
        open_target(
            prompt, COUNT, at, sampling=sampling, report_margins=True, ignore_eos=True, **fields
        )
    )
    verdict = await peer.verdict()
    got = list(zip(verdict.tokens, verdict.margins, strict=True))
    while not verdict.finish:
        draft = [token for token, _ in (hint or [])[len(got) :][: dice.randrange(8)]]
        if draft and dice.random() < 0.4:
            draft[-1] = (draft[-1] + 1) % VOCAB
        await peer.send(verify(verdict.step_id + 1, verdict.new_len, draft, at=at))
        verdict = await peer.verdict()
        got += zip(verdict.tokens, verdict.margins, strict=True)
    await peer.send(target_pb2.CloseSession(key=at))
    await peer.reply()
    peer.call.cancel()
    return got


def prompts() -> list[list[int]]:
    """Some have a beginning in common, longer than a chunk of the grid."""
    common = random_ids(37, seed=1)
    return [
        common + random_ids(9, seed=2),
        random_ids(50, seed=3),
        common + random_ids(20, seed=4),
        random_ids(5, seed=5),
        common[:33],
        common + random_ids(9, seed=2),
    ]


def engine_of(kind: str, directory: Path, pages: int) -> Any:
    if kind == "shapes":
        return ShapeEngine(pages=pages, page_tokens=8, chunk=16, max_length=160)
    engine = load(directory, kind, pages)
    assert engine.rows_independent == (kind == "native")
    return engine


@pytest.mark.parametrize("kind", KINDS)
async def test_preemption_and_hits_change_no_bit(directory: Path, kind: str) -> None:
    """NU-1, NU-9, NU-12, WC-22: alone and plain, or with drafts among others in too few pages."""
    async with target(engine_of(kind, directory, 200)) as service:
        plain = [
            await generate(service, n, prompt, no_prefix_cache=True)
            for n, prompt in enumerate(prompts())
        ]
    engine = engine_of(kind, directory, 30)
    async with target(engine, preempt_idle_ms=100) as service:
        crowd = await asyncio.gather(
            *(generate(service, n, p, plain[n]) for n, p in enumerate(prompts()))
        )
        again = [await generate(service, n, p, plain[n]) for n, p in enumerate(prompts())]
        assert service.count("preemptions") > 0
        assert service.count("prompt_tokens", source="cache") > 0
        await service.app.scheduler.idle.wait()
    assert crowd == plain and again == plain
    engine.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
async def test_forks_change_no_bit(directory: Path, kind: str) -> None:
    prompt = prompts()[0]
    async with target(engine_of(kind, directory, 200)) as service:
        plain = [await generate(service, n, prompt, no_prefix_cache=True) for n in range(3)]
        peer = service.peer()
        await peer.send(open_target(prompt, COUNT, key(9), no_prefix_cache=True))
        forks = await asyncio.gather(
            *(
                generate(service, n, prompt, plain[n], fork_of=key(9), no_prefix_cache=True)
                for n in range(3)
            )
        )
        assert (await peer.verdict()).cached_tokens == 0
        assert service.count("prompt_tokens", source="cache") > 0
    assert forks == plain


@pytest.mark.parametrize("kind", KINDS)
async def test_a_reopened_session_goes_on_as_it_was(directory: Path, kind: str) -> None:
    """The prompt from the cache or again in chunks, what came after it in blocks."""
    prompt, fields = prompts()[0], {"report_margins": True, "ignore_eos": True}
    async with target(engine_of(kind, directory, 200)) as service:
        plain = await generate(service, 0, prompt)
        for number, done in enumerate((1, 9, 30), start=1):
            peer = service.peer()
            ids = prompt + [token for token, _ in plain[:done]]
            sampling = common_pb2.Sampling(temperature=0.8, seed=0)
            request = open_target(
                ids, 10, key(number), prompt_len=len(prompt), sampling=sampling, **fields
            )
            await peer.send(request)
            verdict = await peer.verdict()
            assert verdict.cached_tokens > 0
            await peer.send(verify(1, verdict.new_len, [plain[done + 1][0], 0], at=key(number)))
            got = [verdict, await peer.verdict()]
            pairs = [p for v in got for p in zip(v.tokens, v.margins, strict=True)]
            assert len(pairs) >= 3 and pairs == plain[done : done + len(pairs)]


@pytest.mark.parametrize("kind", KINDS)
async def test_going_back_into_the_prompt_and_preemption(directory: Path, kind: str) -> None:
    """What is left of a chunk is computed again together with its old rest."""
    prompt, back = random_ids(46, seed=8), 44
    outputs = []
    for pages in (100, 16):
        async with target(engine_of(kind, directory, pages), preempt_idle_ms=60_000) as service:
            peer = service.peer()
            fields = {"report_margins": True, "no_prefix_cache": True}
            await peer.send(open_target(prompt, 50, key(1), priority=1, **fields))
            await peer.verdict()
            await peer.send(verify(1, back, at=key(1)))
            first = await peer.verdict()
            await peer.send(open_target(random_ids(90, seed=9), 30, key(2), **fields))
            await peer.verdict()
            assert service.count("preemptions") == (pages == 16)
            await peer.send(target_pb2.CloseSession(key=key(2)))
            await peer.reply()
            await peer.send(verify(2, first.new_len, [3, 4], at=key(1)))
            second = await peer.verdict()
            outputs.append((first.tokens, first.margins, second.tokens, second.margins))
    assert outputs[0] == outputs[1]


async def test_copies_reach_the_tensors(directory: Path) -> None:
    """A fork's own copy of the page that it shares in part, and a rollback into a shared one."""
    engine = load(directory, "torch", 60)
    async with target(engine, exactness="fast") as service:
        peer, ids = service.peer(), random_ids(44, seed=6)
        await peer.send(open_target(ids, 20, key(1)))
        await peer.send(open_target(ids, 20, key(2), fork_of=key(1)))
        one, two = [list((await peer.verdict()).tokens) for _ in range(2)]
        assert one == two
        answers = {}
        for n in (1, 2):
            await peer.send(verify(1, 30, at=key(n)))
            answers[n] = list((await peer.verdict()).tokens)
        assert answers[1] == answers[2]
        await peer.send(open_target(ids, 20, key(3)))
        third = await peer.verdict()
        assert third.cached_tokens == 40 and list(third.tokens) == one
        stats = engine.stats()
        assert stats == PoolStats(stats.free, 60, 3, stats.cached)
        engine.check_integrity()
