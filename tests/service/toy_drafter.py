"""A drafter for the process of a toy target: it reads the target's own pages, as a real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.api import Ask, Proposed, never
from engine.colocated import Group, Handles, TapRows, Target
from engine.kv.pool import PageTable
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from tests.service.toy_engine import VOCAB, ToyEngine, continuation, seed_of

Propose = Callable[["ToyDrafter", Ask, list[int]], Proposed]


def perfect(drafter: ToyDrafter, ask: Ask, ids: list[int]) -> Proposed:
    return Proposed(tuple(continuation(ids, ask.k, seed_of(ask.sampling))))


def rough(drafter: ToyDrafter, ask: Ask, ids: list[int]) -> Proposed:
    """Wrong from a token on that depends on the position."""
    right = continuation(ids, ask.k, seed_of(ask.sampling))
    wrong = len(ids) % (ask.k + 1)
    return Proposed(tuple((t + (i >= wrong)) % VOCAB for i, t in enumerate(right)))


class ToyDrafter:
    """Implements `engine.api.Drafter` beside a `ToyEngine`."""

    method, max_draft_tokens, once_ns = "toy", 7, 0
    services = ("specwire.v1.DraftService",)

    def __init__(self, propose: Propose = perfect) -> None:
        self.script, self.engine = propose, ToyEngine()
        # How many sessions each forward served.
        self.forwards: list[int] = []

    def register(self, server: Any, *, incarnation: int, registry: Any) -> None:
        servicer = _Info(incarnation, self)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)

    def describe(self, target: Target) -> tuple[Group, ...]:
        return ()

    def attach(self, handles: Handles) -> tuple[int, ...]:
        return ()

    def warm_up(self, stopped: Callable[[], bool] = never) -> None: ...

    def write(self, rows: TapRows) -> None: ...

    def propose(self, asks: Sequence[Ask]) -> list[Proposed]:
        self.forwards.append(len(asks))
        return [self.script(self, ask, [*self._ids(ask.table), ask.anchor]) for ask in asks]

    def _ids(self, table: PageTable) -> list[int]:
        """What the target has in the session's pages: the context and no more."""
        size = self.engine.pool.page_tokens
        kept = [
            self.engine._kv[table.pages[position // size]][position % size]
            for position in range(table.length)
        ]
        assert None not in kept, "a proposal over pages that nobody wrote"
        return [token for token in kept if token is not None]


class _Info(draft_pb2_grpc.DraftServiceServicer):
    def __init__(self, incarnation: int, drafter: ToyDrafter) -> None:
        self._incarnation, self._drafter = incarnation, drafter

    async def GetInfo(self, request: Any, context: Any) -> draft_pb2.DraftServiceGetInfoResponse:
        worker = common_pb2.WorkerInfo(protocol_major=1, incarnation=self._incarnation)
        drafter = draft_pb2.DrafterInfo(
            method=self._drafter.method,
            max_draft_tokens=self._drafter.max_draft_tokens,
            is_default=True,
        )
        return draft_pb2.DraftServiceGetInfoResponse(worker=worker, drafters=[drafter])
