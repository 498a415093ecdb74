"""A target's stream of rows at a draft that answers where it reads: each answer brings credit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from draft_svc.row_stream import RowStream
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from target_svc.asks import Answer, Question
from target_svc.features import SessionRows
from target_svc.metrics import Metrics
from target_svc.push_stream import PushStream
from target_svc.sessions import Key
from target_svc.settings import TargetSettings

ROWS, WIDTH = 8, 2048  # 32 KiB a round


class InPlace:
    """Stands for the protocol: a question is answered at `hand_over`, once its rows are there."""

    def __init__(self) -> None:
        self.rounds = self.worker = self
        self.metrics = SimpleNamespace(event=print)
        self.rows = self.wanted = self.without_rows = 0
        self._open: tuple[draft_pb2.Advance, Callable[[draft_pb2.DraftReply], None]] | None = None

    def take_rows(self, target: int, chunk: draft_pb2.FeatureChunk) -> None:
        self.rows += chunk.count
        self.hand_over()

    def asked(self, target: int, ask: draft_pb2.Advance, reply: Any) -> None:
        self.wanted += ask.rows_count
        self._open = ask, reply
        self.without_rows += self.rows < self.wanted

    def hand_over(self) -> None:
        if self._open is not None and self.rows >= self.wanted:
            (ask, reply), self._open = self._open, None
            proposal = common_pb2.Proposal(key=ask.key, step_id=ask.step_id, ids=[1])
            reply(draft_pb2.DraftReply(proposal=proposal))


class Servicer(draft_pb2_grpc.DraftServiceServicer):
    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol

    async def PushFeatures(  # type: ignore[override]
        self, request_iterator: AsyncIterator[draft_pb2.PushFeaturesRequest], context: Any
    ) -> None:
        await RowStream(self._protocol, context.write).serve(request_iterator)


@pytest.mark.parametrize("window", [48 << 10, 32 << 20])
async def test_the_credit_of_a_round_is_there_for_the_next(window: int, tmp_path: Path) -> None:
    """Each question has its rows with it, also where the window has no room for two rounds'."""
    protocol, loop = InPlace(), asyncio.get_running_loop()
    server = grpc.aio.server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(Servicer(protocol), server)
    address = f"unix:{tmp_path / 'd'}"
    server.add_insecure_port(address)
    await server.start()
    settings = TargetSettings(push_window_bytes=window)
    stream = PushStream(address, settings, 7, Metrics())
    rows = SessionRows(stream, Key(1, 1, 1))
    for step in range(12):
        done: asyncio.Future[Answer] = loop.create_future()
        rows.push(step, step * ROWS, np.zeros((ROWS, WIDTH), np.uint16))
        question = Question(step, 1 + step * ROWS, [1] * ROWS, 4, 10**6)
        rows.ask(question, done.set_result)
        rows.hurry()
        assert isinstance(await asyncio.wait_for(done, 5), common_pb2.Proposal)
    assert protocol.without_rows == 0
    await stream.close()
    await server.stop(0)
