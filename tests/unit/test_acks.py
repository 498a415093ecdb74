"""What a draft says of the rows it took: with its answer, or soon by itself."""

from __future__ import annotations

import asyncio

import pytest

from draft_svc import acks as module
from draft_svc.acks import Acks
from specwire.errors import Reason, SpecwireError
from specwire.v1 import common_pb2, draft_pb2

REFUSAL = SpecwireError(Reason.ROWS_REFUSED, "rows were not taken: gap")


def chunk(step_id: int, size: int = 100) -> draft_pb2.FeatureChunk:
    key = common_pb2.SessionKey(session_id=step_id)
    return draft_pb2.FeatureChunk(key=key, step_id=step_id, rows=bytes(size))


def credits(responses: list[draft_pb2.PushFeaturesResponse]) -> list[list[int]]:
    return [[one.credit_bytes for one in response.acks] for response in responses]


async def test_they_go_with_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One credit without a key for all that was taken, one each for what was not."""
    monkeypatch.setattr(module, "_WITHIN_S", 0.02)
    said: list[draft_pb2.PushFeaturesResponse] = []
    acks = Acks(said.append)
    acks.keep()
    acks.add(chunk(1), None)
    acks.add(chunk(2, 7), REFUSAL)
    acks.add(chunk(3), None)
    refused, taken = acks.take()
    assert (refused.key.session_id, refused.step_id, refused.credit_bytes) == (2, 2, 7)
    assert refused.error.reason == Reason.ROWS_REFUSED
    assert taken.credit_bytes == 200 and not taken.HasField("key")
    acks.keep()
    assert not acks.take()
    await asyncio.sleep(0.06)
    assert not said, "they were taken"


async def test_they_go_alone_where_no_answer_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WITHIN_S", 0.02)
    said: list[draft_pb2.PushFeaturesResponse] = []
    acks = Acks(said.append)
    for size in (5, 6):
        acks.add(chunk(1, size), None)
        acks.keep()
        assert credits(said) == [[5]][: size - 5]
        await asyncio.sleep(0.06)
    assert credits(said) == [[5], [6]]


@pytest.mark.parametrize("refusal", [None, REFUSAL])
async def test_much_credit_goes_at_once(refusal: SpecwireError | None) -> None:
    """The sender may wait for it, whatever became of the rows."""
    said: list[draft_pb2.PushFeaturesResponse] = []
    acks = Acks(said.append)
    acks.add(chunk(1, module._MOST_BYTES), refusal)
    acks.keep()
    assert not said
    acks.add(chunk(2, 1), None)
    acks.keep()
    assert sum(sum(found) for found in credits(said)) == module._MOST_BYTES + 1
    assert len(said) == 1 and not acks.take()
    acks.close()
