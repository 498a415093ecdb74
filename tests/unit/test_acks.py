"""What a draft says of the rows it took: with its answer, or soon by itself."""

from __future__ import annotations

import asyncio

import pytest

from draft_svc import acks as module
from draft_svc.acks import Acks
from specwire.v1 import draft_pb2


def ack(step_id: int, size: int = 100) -> draft_pb2.FeatureAck:
    return draft_pb2.FeatureAck(step_id=step_id, credit_bytes=size)


def steps(responses: list[draft_pb2.PushFeaturesResponse]) -> list[list[int]]:
    return [[one.step_id for one in response.acks] for response in responses]


async def test_they_go_with_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WITHIN_S", 0.02)
    said: list[draft_pb2.PushFeaturesResponse] = []
    acks = Acks(said.append)
    acks.keep([ack(1), ack(2)])
    acks.keep([])
    acks.keep([ack(3)])
    assert [one.step_id for one in acks.take()] == [1, 2, 3] and not acks.take()
    await asyncio.sleep(0.06)
    assert not said, "they were taken"


async def test_they_go_alone_where_no_answer_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WITHIN_S", 0.02)
    said: list[draft_pb2.PushFeaturesResponse] = []
    acks = Acks(said.append)
    acks.keep([ack(1)])
    assert not said
    await asyncio.sleep(0.06)
    acks.keep([ack(2)])
    await asyncio.sleep(0.06)
    assert steps(said) == [[1], [2]]


async def test_much_credit_goes_at_once() -> None:
    said: list[draft_pb2.PushFeaturesResponse] = []
    acks = Acks(said.append)
    acks.keep([ack(1, module._MOST_BYTES)])
    assert not said
    acks.keep([ack(2, 1)])
    assert steps(said) == [[1, 2]] and not acks.take()
