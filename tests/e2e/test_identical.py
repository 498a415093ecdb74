"""Contract level L2 on the real model: the drafter, K and a dying draft never change a token."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from coordinator.bench_prompts import Prompt
from coordinator.local import LocalDeployment
from specwire.client import AsyncClient, Delta, Finished, GenerateOptions, Generation

pytestmark = pytest.mark.model

TOKENS = 48
SEED = 20
Ids = tuple[int, ...]
References = dict[float, list[Ids]]


def options_of(prompt: Prompt, temperature: float, method: str, k: int | None) -> GenerateOptions:
    return {
        "messages": prompt.messages,
        "max_tokens": TOKENS,
        "temperature": temperature,
        "seed": SEED,
        "method": method,
        "num_speculative_tokens": k,
        "exactness": "exact",
    }


async def generate_all(
    address: str, prompts: Sequence[Prompt], temperature: float, method: str, k: int | None = None
) -> list[Generation]:
    async with AsyncClient(address) as client:
        calls = [client.generate(**options_of(p, temperature, method, k)) for p in prompts]
        return await asyncio.gather(*calls)


async def plain_ids(
    deployment: LocalDeployment, prompts: Sequence[Prompt], temperature: float, known: References
) -> list[Ids]:
    if temperature not in known:
        found = await generate_all(deployment.address, prompts, temperature, "plain")
        known[temperature] = [generation.token_ids for generation in found]
    return known[temperature]


@pytest.fixture(scope="module")
def some(prompts: list[Prompt]) -> list[Prompt]:
    """Half of each category, all at once."""
    return prompts[::2]


@pytest.fixture(scope="module")
def known() -> References:
    """What plain decoding gave, kept between the tests."""
    return {}


def assert_speculated(found: Sequence[Generation]) -> None:
    """Otherwise the test compares plain decoding with itself."""
    accepted = sum(generation.acceptance.accepted_tokens for generation in found)
    assert accepted > 0, [dict(generation.acceptance.fallbacks) for generation in found]


# Method, K and temperature; K None is what a request gets that says nothing: chosen for each round.
# Every method and temperature, both ways of choosing K; below, a draft dies at dflash and 3.
QUICK = (
    ("ngram", 7, 0.8),
    ("dflash", 1, 0.0),
    ("dspark", 7, 0.0),
    ("hybrid", None, 0.8),
    ("dspark", None, 0.8),
)
GRID = tuple(
    (*drafter, temperature)
    for drafter in (
        ("ngram", 7), ("dflash", 1), ("dflash", 3), ("dspark", 7), ("hybrid", None),
        ("dspark", None),
    )
    for temperature in (0.0, 0.8)
)  # fmt: skip


@pytest.mark.parametrize(
    ("method", "k", "temperature"),
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in GRID if case not in QUICK),
    ],
)
async def test_the_drafter_never_changes_a_token(
    deployment: LocalDeployment,
    some: list[Prompt],
    known: References,
    method: str,
    k: int | None,
    temperature: float,
) -> None:
    """K is fixed, or chosen round by round."""
    expected = await plain_ids(deployment, some, temperature, known)
    found = await generate_all(deployment.address, some, temperature, method, k)
    assert [generation.token_ids for generation in found] == expected
    assert {generation.acceptance.method for generation in found} == {method}
    assert max(max(g.acceptance.per_step_drafted, default=0) for g in found) <= (k or 7)
    assert_speculated(found)


async def test_alone_and_in_company_are_the_same(
    deployment: LocalDeployment, some: list[Prompt], known: References
) -> None:
    expected = await plain_ids(deployment, some, 0.8, known)
    for at in (0, 2, 5):
        alone = await generate_all(deployment.address, some[at : at + 1], 0.8, "dflash", 5)
        assert alone[0].token_ids == expected[at]


async def stream_and_kill(
    deployment: LocalDeployment, prompts: Sequence[Prompt], temperature: float, at_round: int
) -> list[tuple[Ids, Finished]]:
    """Streams all prompts; the draft is killed when the first stream reaches that round."""

    async def follow(client: AsyncClient, prompt: Prompt) -> tuple[Ids, Finished]:
        ids: list[int] = []
        rounds = 0
        async with client.stream(**options_of(prompt, temperature, "dflash", 3)) as stream:
            async for event in stream:
                if isinstance(event, Finished):
                    return tuple(ids), event
                assert isinstance(event, Delta)
                ids += event.token_ids
                rounds += 1
                if rounds == at_round and prompt is prompts[0]:
                    deployment.children["draft_svc"].process.kill()
        raise AssertionError("a stream without an end")

    async with AsyncClient(deployment.address) as client:
        return await asyncio.gather(*(follow(client, prompt) for prompt in prompts))


async def draft_is(deployment: LocalDeployment, ready: bool) -> None:
    async with AsyncClient(deployment.address) as client:
        while True:
            states = {worker.role: worker.state for worker in (await client.info()).workers}
            if (states["draft"] == "ready") == ready:
                return
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
async def test_a_killed_draft_costs_speed_only(
    deployment: LocalDeployment, some: list[Prompt], known: References, temperature: float
) -> None:
    expected = await plain_ids(deployment, some, temperature, known)
    at_round = random.randint(1, 15)
    print(f"killing the draft at round {at_round}")  # shown when the test fails
    try:
        ended = await stream_and_kill(deployment, some, temperature, at_round)
    finally:
        process = deployment.children["draft_svc"].process
        process.kill()
        process.wait()
        deployment.restart("draft_svc")
    assert [ids for ids, _ in ended] == expected
    # Somebody was in the middle of speculation when it ended.
    assert any(final.acceptance.fallbacks for _, final in ended)

    await asyncio.wait_for(draft_is(deployment, ready=True), 30)
    again = await generate_all(deployment.address, some, temperature, "dflash", 3)
    assert [generation.token_ids for generation in again] == expected
    assert all(generation.acceptance.method == "dflash" for generation in again)
    assert_speculated(again)
