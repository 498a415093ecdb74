"""The native engine under the target service: shared pages and preemption change no bit.

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

Output = list[tuple[int, float]]
COUNT = 40
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
        max_length=160,
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


@pytest.mark.parametrize("kernels", KERNELS)
async def test_preemption_and_hits_change_no_bit(directory: Path, kernels: str) -> None:
    """NU-1, NU-9, NU-12, WC-22: alone and plain, or with drafts among others in too few pages."""
    async with target(load(directory, kernels, 200)) as service:
        plain = [
            await generate(service, n, prompt, no_prefix_cache=True)
            for n, prompt in enumerate(prompts())
        ]
    engine = load(directory, kernels, 30)
    assert engine.rows_independent == (kernels == "native")
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


@pytest.mark.parametrize("kernels", KERNELS)
async def test_forks_change_no_bit(directory: Path, kernels: str) -> None:
    prompt = prompts()[0]
    async with target(load(directory, kernels, 200)) as service:
        plain = [await generate(service, n, prompt, no_prefix_cache=True) for n in range(3)]
        parent = open_target(prompt, COUNT, key(9), no_prefix_cache=True)
        peer = service.peer()
        await peer.send(parent)
        forks = await asyncio.gather(
            *(
                generate(service, n, prompt, plain[n], fork_of=key(9), no_prefix_cache=True)
                for n in range(3)
            )
        )
        assert (await peer.verdict()).cached_tokens == 0
    assert forks == plain


@pytest.mark.parametrize("kernels", KERNELS)
async def test_going_back_into_the_prompt_and_preemption(directory: Path, kernels: str) -> None:
    """What is left of a chunk is computed again together with its old rest."""
    prompt, back = random_ids(46, seed=8), 42
    outputs = []
    for pages in (100, 16):
        async with target(load(directory, kernels, pages), preempt_idle_ms=60_000) as service:
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
