"""What a round of 64 sessions costs in the coordinator: loop, links and text, without clients."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.placement import Fleet
from coordinator.session import Session
from coordinator.settings import CoordinatorSettings
from coordinator.tokenizer_cache import TokenizerCache
from coordinator.validation import check
from specwire.v1 import common_pb2, generate_pb2
from tests.service.toy_engine import continuation

SESSIONS, TOKENS, K = 64, 200, 3
# Measured: 3 to 12 ms on one thread of a busy two-core machine. The limit leaves room for machines
# with other work to do; what grows with the square of the sessions would be seen.
LIMIT_MS = 40.0


def request(number: int, k: int | None) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        tokens=generate_pb2.TokenInput(ids=[number, number + 1]),
        sampling=common_pb2.Sampling(temperature=0.0, seed=0),
        max_tokens=TOKENS,
        return_token_ids=True,
        speculation=generate_pb2.Speculation(num_speculative_tokens=k),
    )


async def run(fleet: Fleet, number: int, k: int | None) -> tuple[Session, list[int]]:
    group, ids = fleet.group(""), list[int]()

    async def deliver(delta: generate_pb2.Delta) -> None:
        ids.extend(delta.token_ids)

    spec = check(request(number, k), group, group.text, None)
    session = Session(group, number, spec, group.text)
    await session.run(deliver)
    return session, ids


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Targets and a draft in another process, at sockets in the folder given."""
    folder = tmp_path_factory.mktemp("workers")
    command = [sys.executable, "-m", "tests.service.toy_workers", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        yield folder
        process.communicate(timeout=30)


@pytest.mark.parametrize("place", ["separate", "colocated"])
@pytest.mark.parametrize("k", [K, None], ids=["fixed", "adaptive"])
async def test_a_round_of_64_sessions_costs_milliseconds(
    workers: Path, k: int | None, place: str
) -> None:
    inside = place == "colocated"
    settings = CoordinatorSettings(
        address=f"unix:{workers}/c",
        target=(f"unix:{workers}/{'tc' if inside else 't'}",),
        draft=() if inside else (f"unix:{workers}/d",),
        proposal_wait_min_ms=10_000,
    )
    fleet = Fleet(settings, TokenizerCache(workers))
    try:
        fleet.start()
        for worker in fleet.workers:
            assert await worker.link.wait_ready(10)
        await run(fleet, 900, k)
        before = time.thread_time()
        found = await asyncio.gather(*(run(fleet, number, k) for number in range(1, SESSIONS + 1)))
        spent_ms = (time.thread_time() - before) * 1000
        for number, (session, ids) in enumerate(found, start=1):
            assert ids == continuation([number, number + 1], TOKENS)
            assert session.record.placement == place
        rounds = sum(len(session.record.drafted) for session, _ in found) / SESSIONS
        if k:
            assert rounds <= TOKENS / (K + 1) + 2
        else:  # how often is for times to say, which others on the machine disturb
            assert any(any(session.record.drafted) for session, _ in found)
        print(f"{spent_ms / rounds:.2f} ms a round of {SESSIONS} sessions, {place}")
        # Half as many rounds, with twice the text each, where K is chosen.
        assert spent_ms / rounds < (LIMIT_MS if k else 2 * LIMIT_MS)
    finally:
        await fleet.stop()
