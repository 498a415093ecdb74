"""Runs ahead on the real model: the target process asks the draft process by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from coordinator.bench_prompts import Prompt
from coordinator.host import CoordinatorHost
from coordinator.local import LocalDeployment
from coordinator.settings import CoordinatorSettings
from coordinator.tokenizer_cache import TokenizerCache
from specwire.client import AsyncClient, Generation
from specwire.v1 import draft_pb2, target_pb2

pytestmark = pytest.mark.model
TOKENS, K = 24, 3


async def generated(
    deployment: LocalDeployment, prompts: list[Prompt], folder: Path, ahead: int, *methods: str
) -> tuple[list[list[Generation]], int, int]:
    """What a coordinator of our own gets with each method; how many steps and `Advance`s it sent
    for the first."""
    settings = CoordinatorSettings(
        address=f"unix:{folder}/c{ahead}",
        target=(deployment.target_address,),
        draft=(deployment.draft_address,),
        draft_ahead=ahead,
        drain_ms=0,
        reflection=False,
        # Two cores compute both models: whatever is late would be no round of the draft's.
        proposal_wait_min_ms=5_000,
    )
    async with (
        CoordinatorHost(settings, TokenizerCache(folder)) as host,
        AsyncClient(host.address) as client,
    ):
        (target,), (draft,) = host.fleet.targets, host.fleet.drafts
        assert await target.link.wait_ready(20) and await draft.link.wait_ready(20)
        sent: list[target_pb2.TargetItem | draft_pb2.DraftItem] = []
        noted(target.link, sent)
        noted(draft.link, sent)

        async def each(method: str) -> list[Generation]:
            calls = [
                client.generate(
                    messages=prompt.messages,
                    max_tokens=TOKENS,
                    temperature=temperature,
                    seed=20,
                    method=method,
                    num_speculative_tokens=K if method != "plain" else None,
                    exactness="exact",
                )
                for prompt, temperature in zip(prompts, (0.0, 0.8), strict=True)
            ]
            return await asyncio.gather(*calls)

        found = [await each(methods[0])]
        steps = sum(isinstance(i, target_pb2.TargetItem) and i.HasField("verify") for i in sent)
        told = sum(isinstance(i, draft_pb2.DraftItem) and i.HasField("advance") for i in sent)
        return found + [await each(method) for method in methods[1:]], steps, told


def noted(link: Any, sent: list[Any]) -> None:
    """Keeps what the link sends from now on."""
    send = link.send

    def kept(item: Any) -> bool:
        sent.append(item)
        return bool(send(item))

    link.send = kept


async def test_a_target_that_asks_the_draft_gives_the_same_rounds(
    deployment: LocalDeployment, prompts: list[Prompt], tmp_path: Path
) -> None:
    """Greedy and sampled: the text is that of plain decoding, each round that of driven ones, and
    a window of rounds is one message."""
    some = prompts[:2]
    separate, settled = "dflash@separate", (deployment, some, tmp_path)
    (ahead, plain), steps, told = await generated(*settled, 8, separate, "plain")
    (driven,), driven_steps, driven_told = await generated(*settled, 0, separate)
    for one, two, alone in zip(ahead, driven, plain, strict=True):
        assert one.token_ids == two.token_ids == alone.token_ids
        assert one.acceptance.per_step_drafted == two.acceptance.per_step_drafted
        assert one.acceptance.per_step_accepted == two.acceptance.per_step_accepted
        assert one.acceptance.accepted_tokens > 0 and not one.acceptance.fallbacks
    rounds = sum(one.acceptance.rounds for one in ahead)
    assert driven_steps == rounds <= driven_told
    # The first round of each is asked for; and one may have no room behind the last run.
    assert len(some) <= told <= 2 * len(some) and steps <= rounds // 4
