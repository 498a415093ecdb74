"""What a target is told to send a draft service, and the draft to expect: the same, always."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine.api import Projection
from specwire.v1 import common_pb2
from tests.service.coordinator_harness import PROMPT, ScriptedDraft, World, row_drafter, world
from tests.service.fleet_harness import until
from tests.service.target_harness import TAPS
from tests.service.test_coordinator_faults import LONG, SLOW, started
from tests.service.toy_engine import HIDDEN, continuation

PROJECTION = Projection("draft-fp", TAPS, 3)
TAP_BYTES, OWN_BYTES = 2 * len(TAPS) * HIDDEN, 2 * 3


def drafter(**changes: Any) -> ScriptedDraft:
    return ScriptedDraft(
        **row_drafter(), **{"fingerprint": "draft-fp", "projected_width": 3, **changes}
    )


async def agreed(made: World) -> tuple[int, float]:
    """The encoding of the newest session, and bytes of a row of its prompt."""
    draft = made.draft
    assert draft is not None
    result = await made.generate(max_tokens=20)
    assert list(result.token_ids) == continuation(PROMPT, 20)
    assert result.acceptance.accepted_tokens > 0
    opened = draft.opens[-1]
    row = draft.row_bytes[opened.key.session_id, 0] / len(PROMPT)
    return opened.row_encoding, row


async def test_rows_go_through_the_projection_of_the_draft_that_gets_them() -> None:
    async with world(drafter(), {"projection": PROJECTION}, num_speculative_tokens=3) as made:
        assert await agreed(made) == (common_pb2.ROW_ENCODING_PROJECTED, OWN_BYTES)


@pytest.mark.parametrize(
    "changes", [{"fingerprint": "another"}, {"projected_width": 0}, {"projected_width": 4}]
)
async def test_another_draft_gets_the_rows_of_the_layers(changes: dict[str, Any]) -> None:
    draft = drafter(**changes)
    async with world(draft, {"projection": PROJECTION}, num_speculative_tokens=3) as made:
        assert await agreed(made) == (common_pb2.ROW_ENCODING_TAPS, TAP_BYTES)


async def test_a_target_that_comes_back_without_it_sends_those_of_the_layers() -> None:
    """And with it again."""
    async with world(drafter(), {"projection": PROJECTION}, num_speculative_tokens=3) as made:
        await agreed(made)
        for projection, expected in (
            (None, (common_pb2.ROW_ENCODING_TAPS, TAP_BYTES)),
            (PROJECTION, (common_pb2.ROW_ENCODING_PROJECTED, OWN_BYTES)),
        ):
            await made.app.stop()
            await made.start_target(projection=projection)
            (worker,) = made.host.fleet.targets
            now = made.app.incarnation
            await until(lambda worker=worker, now=now: worker.link.incarnation == now)
            assert await agreed(made) == expected


@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 0), (3, 3)])
async def test_a_draft_that_comes_back_reading_other_rows(before: int, after: int) -> None:
    """In the middle of a session: the target is opened again where what it sends is not read."""
    draft = drafter(projected_width=before)
    engine = {**SLOW, "projection": PROJECTION}
    async with world(draft, engine, num_speculative_tokens=2) as made:
        task = await started(made)
        await draft.stop()
        await asyncio.sleep(0.3)
        draft.drafter.projected_width = after
        widths = watched(draft)
        await made.start_draft()
        result = await task
    newest = draft.opens[-1]
    projected = newest.row_encoding == common_pb2.ROW_ENCODING_PROJECTED
    assert projected == bool(after)
    assert widths[newest.key.generation] == {OWN_BYTES if projected else TAP_BYTES}
    assert list(result.token_ids) == continuation(PROMPT, LONG)


def watched(draft: ScriptedDraft) -> dict[int, set[int]]:
    """Bytes of a row that come from now on, by generation."""
    found: dict[int, set[int]] = defaultdict(set)
    push = draft.PushFeatures

    async def pushed(frames: Any, context: Any) -> AsyncIterator[Any]:
        async def seen() -> AsyncIterator[Any]:
            async for frame in frames:
                for chunk in frame.chunks:
                    found[chunk.key.generation].add(len(chunk.rows) // chunk.count)
                yield frame

        async for answer in push(seen(), context):
            yield answer

    draft.PushFeatures = pushed  # type: ignore[method-assign]
    return found
