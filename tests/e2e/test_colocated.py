"""Both topologies with the real model: the draft in a service, or in the target's process, gives
the text of plain decoding; killed, it goes on with the same tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from coordinator.bench import compare
from coordinator.bench_modes import parse_modes
from coordinator.bench_prompts import Prompt, load_prompts
from coordinator.bench_run import BenchOptions
from coordinator.demo import PROMPTS
from coordinator.local import COLOCATED_METHOD, LocalDeployment, LocalOptions
from specwire.client import AsyncClient, Delta, Finished, GenerateOptions, Generation

pytestmark = pytest.mark.model

TOKENS = 40


@pytest.fixture(scope="module")
def colocated() -> Iterator[LocalDeployment]:
    # However long a start takes on a busy machine.
    patient = (("coordinator", ("--target-return-ms", "90000")),)
    with LocalDeployment(LocalOptions(colocate=COLOCATED_METHOD, extra=patient)) as running:
        yield running


def options_of(prompt: Prompt, temperature: float, method: str) -> GenerateOptions:
    return {
        "messages": prompt.messages,
        "max_tokens": TOKENS,
        "temperature": temperature,
        "seed": 20,
        "method": method,
        # Named: on few cores several sessions soon find that plain decoding yields more.
        "num_speculative_tokens": None if method == "plain" else 3,
        "exactness": "exact",
    }


async def generate_all(
    address: str, prompts: Sequence[Prompt], temperature: float, method: str
) -> list[Generation]:
    async with AsyncClient(address) as client:
        calls = [client.generate(**options_of(p, temperature, method)) for p in prompts]
        return await asyncio.gather(*calls)


# Greedy text is compared in the run of the bench below.
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
async def test_both_topologies_give_the_text_of_plain_decoding(
    deployment: LocalDeployment,
    colocated: LocalDeployment,
    prompts: list[Prompt],
    temperature: float,
) -> None:
    some = prompts[:4]
    plain = await generate_all(deployment.address, some, temperature, "plain")
    for at, placement in ((deployment, "separate"), (colocated, "colocated")):
        found = await generate_all(at.address, some, temperature, "dflash")
        assert [g.token_ids for g in found] == [g.token_ids for g in plain]
        assert {g.acceptance.placement for g in found} == {placement}
        assert sum(g.acceptance.accepted_tokens for g in found) > 0


async def test_the_process_of_both_is_killed_and_started_again(
    deployment: LocalDeployment, colocated: LocalDeployment, prompts: list[Prompt]
) -> None:
    """WC-22: committed ids are all that it needs."""
    plain = await generate_all(deployment.address, prompts[:1], 0.8, "plain")
    ids: list[int] = []
    killed = False
    async with (
        AsyncClient(colocated.address) as client,
        client.stream(**options_of(prompts[0], 0.8, "dflash")) as stream,
    ):
        async for event in stream:
            if isinstance(event, Finished):
                break
            assert isinstance(event, Delta)
            ids += event.token_ids
            if len(ids) >= 8 and not killed:
                killed = True
                process = colocated.children["target_svc"].process
                process.kill()
                process.wait()
                colocated.spawn("target_svc")
    assert isinstance(event, Finished) and tuple(ids) == plain[0].token_ids
    assert event.acceptance.fallbacks["target_lost"] == 1
    assert event.acceptance.placement == "colocated"


async def test_bench_of_both_in_one_run(
    deployment: LocalDeployment, colocated: LocalDeployment, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(PROMPTS.read_text().splitlines()[:2]) + "\n")
    report = await compare(
        deployment.address,
        file,
        load_prompts(file),
        parse_modes("plain,dflash", "exact"),
        BenchOptions(max_tokens=24),
        colocate=True,
        colocated={COLOCATED_METHOD: colocated.address},
    )
    assert list(report["modes"]) == ["plain", "dflash", "dflash@colocated"]
    methods = report["environment"]["methods"]
    assert methods["dflash"] == "dflash@separate"
    for entry in report["modes"].values():
        assert entry["identical"] == entry["prompts"] == 2
    found = report["colocated_over_separate"]["dflash@colocated"]
    assert found["decode_tokens_per_s"] > 0
    assert min(found["outside_ms_p50"], found["separate_outside_ms_p50"]) > 0
    json.dumps(report)
