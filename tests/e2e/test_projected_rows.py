"""Rows through the draft's projection on the real model: the same text, drafts as good, and a fifth
of the bytes."""

from __future__ import annotations

import asyncio
import re
import socket
import urllib.request

import pytest

from coordinator.bench_prompts import Prompt
from coordinator.local import LocalDeployment, LocalOptions, parse_extra
from specwire.client import AsyncClient, Generation

pytestmark = pytest.mark.model
TOKENS, K = 32, 3
ROW_BYTES = 2 * 576


async def generated(
    deployment: LocalDeployment, prompts: list[Prompt], *methods: str
) -> list[list[Generation]]:
    async with AsyncClient(deployment.address) as client:

        def call(prompt: Prompt, method: str, temperature: float) -> asyncio.Future[Generation]:
            return asyncio.ensure_future(
                client.generate(
                    messages=prompt.messages,
                    max_tokens=TOKENS,
                    temperature=temperature,
                    seed=20,
                    method=method,
                    num_speculative_tokens=None if method == "plain" else K,
                    exactness="exact",
                )
            )

        return [
            await asyncio.gather(
                *(call(p, m, t) for p, t in zip(prompts, (0.0, 0.8, 0.0), strict=True))
            )
            for m in methods
        ]


async def test_the_text_of_plain_decoding(
    deployment: LocalDeployment, prompts: list[Prompt]
) -> None:
    """DSpark, whose projection the target does not have, is sent the layers' rows beside it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    extra = parse_extra(
        [
            "target.project-rows=true",
            f"target.metrics-port={port}",
            "coordinator.proposal-wait-min-ms=5000",
        ]
    )
    some = prompts[:3]
    (raw,) = await generated(deployment, some, "dflash")
    with LocalDeployment(LocalOptions(extra=extra)) as running:
        plain, projected = await generated(running, some, "plain", "dflash")
        sent = row_bytes(port)
        (other,) = await generated(running, some, "dspark")
        sent_to_other = row_bytes(port) - sent
    for alone, *drafted in zip(plain, projected, other, raw, strict=True):
        assert all(one.token_ids == alone.token_ids for one in drafted)
    accepted, before = (
        sum(one.acceptance.accepted_tokens for one in found) for found in (projected, raw)
    )
    assert accepted > 0.8 * before > 0
    assert sent % ROW_BYTES == 0 and 4 * sent < sent_to_other < 6 * sent


def row_bytes(port: int) -> float:
    """Of rows that left the target so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        text = page.read().decode()
    return sum(float(value) for value in re.findall(r"row_bytes_total\{.*sent.*\} (\S+)", text))
