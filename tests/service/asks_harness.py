"""A target whose only session asks a scripted draft service."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from specwire.v1 import draft_pb2, target_pb2
from tests.service.fleet_harness import until
from tests.service.target_harness import (
    AskedDraft,
    AskScript,
    Peer,
    Target,
    answer,
    draft_server,
    open_target,
    push_to,
    target,
    verify,
)
from tests.service.toy_engine import ToyEngine, continuation

PROMPT = [5, 6, 7]
TEXT = continuation(PROMPT, 60)
LONG_US = 10_000_000
Reply = draft_pb2.DraftReply


def text_from(length: int, count: int) -> list[int]:
    """The tokens that follow so many of the text."""
    return TEXT[length - len(PROMPT) :][:count]


def right(ask: draft_pb2.Advance) -> list[Reply]:
    return [answer(ask, text_from(ask.base_len + len(ask.tokens), ask.k), source="toy")]


def run(step_id: int, base_len: int, rounds: int = 3, **changes: Any) -> target_pb2.Verify:
    """A step over two right tokens, and `rounds` further ones with two of the draft's each."""
    fields = {
        "free_run": rounds,
        "then_propose": 2,
        "drafts_ahead": True,
        "draft_wait_us": LONG_US,
    }
    draft = text_from(base_len, 2)
    return verify(step_id, base_len, draft, **{**fields, **changes})


@dataclass
class World:
    service: Target
    peer: Peer
    draft: AskedDraft
    address: str
    heard: list[target_pb2.Verdict] = field(default_factory=list)

    async def up(self) -> None:
        """The draft answers on its stream."""
        streams = self.service.app._exporter._streams
        await until(lambda: streams[self.address]._up)

    async def held(self, step: target_pb2.Verify | None = None) -> draft_pb2.Advance:
        """Begins a run whose first verdict waits for the draft."""
        await self.peer.send(step or run(1, 4))
        return await self.draft.asked(1)

    async def verdicts(self, count: int) -> list[target_pb2.Verdict]:
        self.heard += [await self.peer.verdict() for _ in range(count)]
        return self.heard[-count:]

    def tokens(self) -> list[int]:
        """Everything that was said since the prompt's step."""
        return [token for verdict in self.heard for token in verdict.tokens]


@asynccontextmanager
async def asking(
    script: AskScript = lambda _: [],
    engine: ToyEngine | None = None,
    max_new: int = 60,
    settings: dict[str, Any] | None = None,
    **fields: Any,
) -> AsyncIterator[World]:
    """A session of a prompt of three, opened, whose rows go to a scripted draft."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/d.sock"
        async with (
            draft_server(address, AskedDraft(script)) as draft,
            target(engine, **settings or {}) as service,
        ):
            assert isinstance(draft, AskedDraft)
            made = World(service, service.peer(), draft, address)
            await made.peer.send(open_target(PROMPT, max_new, push_to=push_to(address), **fields))
            await made.peer.verdict()
            await made.up()
            yield made
