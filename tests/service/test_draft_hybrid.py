"""The hybrid drafter over a real link: lookup and a drafter that reads rows behind one name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from draft_svc.host import DraftHost
from draft_svc.loading import load_methods
from draft_svc.methods.base import REASON_ROWS_MISSING, Draft, Request
from draft_svc.methods.hybrid import HybridMethod
from draft_svc.methods.ngram import NgramMethod
from draft_svc.settings import DraftSettings
from engine.api import Sampling
from specwire.rpc import channel_options
from specwire.v1 import draft_pb2, draft_pb2_grpc
from tests.engine.tiny import write_llama
from tests.service.draft_peer import (
    LIMITS,
    Link,
    Rows,
    ToyContext,
    ToyMethod,
    advance_item,
    open_item,
    session_key,
)

KEY = session_key()


class CarefulToy(ToyMethod):
    """Says so where the last row is missing, as a real drafter does."""

    def propose(self, requests: Sequence[Request[ToyContext]]) -> list[Draft]:
        return [
            super(CarefulToy, self).propose([request])[0]
            if len(request.context.ids) - 2 in request.context.rows
            else Draft(reason=REASON_ROWS_MISSING)
            for request in requests
        ]


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[tuple[Any, CarefulToy]]:
    toy = CarefulToy()
    lookup = NgramMethod(min_n=2, max_n=4, max_draft_tokens=5)
    host = DraftHost(
        lambda: {"hybrid": HybridMethod(lookup, toy, owns_neural=True)},
        address=f"unix:{tmp_path}/draft.sock",
        limits=LIMITS,
        default_method="hybrid",
    )
    async with (
        host,
        grpc.aio.insecure_channel(host.address, options=channel_options(link=True)) as channel,
    ):
        yield draft_pb2_grpc.DraftServiceStub(channel), toy


async def test_a_proposal_names_its_source(service: tuple[Any, CarefulToy]) -> None:
    stub, toy = service
    info = (await stub.GetInfo(draft_pb2.DraftServiceGetInfoRequest())).drafters[0]
    assert info.method == "hybrid" and info.needs_rows and info.row_format.width == 4
    link, rows = Link(stub), Rows(stub)
    await link.ask(open_item(KEY, [10, 11, 12, 13], "hybrid"))
    await rows.push(KEY, 0, 0, [1, 2, 3, 40])
    reply = await link.ask(advance_item(KEY, 0, 4, [7], 3))
    assert list(reply.proposal.ids) == [40, 41, 42] and reply.proposal.source == "toy"
    # The text repeats itself; the rows come all the same, and keep the context current.
    text = [10, 11, 12, 13, 7]
    sources = []
    for step in range(1, 30):
        token = [10, 11, 12, 13, 7][(step - 1) % 5]
        await rows.push(KEY, step, len(text) - 1, [90])
        reply = await link.ask(advance_item(KEY, step, len(text), [token], 3))
        text.append(token)
        sources.append(reply.proposal.source)
        if sources[-1] == "ngram":
            following = [[10, 11, 12, 13, 7][(step + i) % 5] for i in range(3)]
            assert list(reply.proposal.ids) == following
    assert sources[0] == "toy" and set(sources[-10:]) == {"ngram"}
    (context,) = toy.contexts
    assert context.ids == text and set(context.rows) == set(range(len(text) - 1))


async def test_rows_that_do_not_come_leave_the_lookup(service: tuple[Any, CarefulToy]) -> None:
    """WC-16: without its rows the neural drafter is silent, and the lookup is not."""
    link = Link(service[0])
    await link.ask(open_item(KEY, [5, 6, 7, 8, 5], "hybrid"))
    none_coming = advance_item(KEY, 0, 5, [6], 2, rows_count=0)
    reply = await link.ask(none_coming)
    assert list(reply.proposal.ids) == [7, 8] and reply.proposal.source == "ngram"
    late = advance_item(KEY, 1, 6, [7], 2, rows_count=6, deadline_ms=100)
    reply = await link.ask(late)
    assert list(reply.proposal.ids) == [8, 5] and reply.proposal.source == "ngram"
    assert reply.proposal.timings.queue_ns < 95_000_000  # before the one who asks has left
    new = session_key(2)
    await link.ask(open_item(new, [1, 2, 3], "hybrid"))
    reply = await link.ask(advance_item(new, 0, 3, [4], 2, rows_count=0))
    assert not reply.proposal.ids and reply.proposal.reason == REASON_ROWS_MISSING


def test_the_settings_compose_it_with_a_model(tmp_path: Path) -> None:
    """One copy of the model serves both names, and its pages are counted once."""
    write_llama(tmp_path)
    flags = ["--methods", "ngram,hybrid,draft_model", "--draft-model", str(tmp_path)]
    flags += ["--hybrid-neural", "draft_model", "--dtype", "float32", "--kv-pages", "40"]
    methods = load_methods(DraftSettings.load(flags), lambda line: None)
    assert list(methods) == ["ngram", "hybrid", "draft_model"]
    assert sum(method.stats().total for method in methods.values()) == 40
    for method in methods.values():
        method.warm_up()
    hybrid, alone = methods["hybrid"], methods["draft_model"]
    assert hybrid.info.rows is None and hybrid.info.tokenizer_hash == alone.info.tokenizer_hash
    assert hybrid.info.costs == alone.info.costs != ()
    context = hybrid.open(list(range(3, 23)), Sampling(temperature=0.0))
    other = alone.open(list(range(3, 23)), Sampling(temperature=0.0))
    (draft,) = hybrid.propose([Request(context, 4)])
    assert draft.source == "draft_model"
    assert draft.ids == alone.propose([Request(other, 4)])[0].ids
    hybrid.close(context)
    alone.close(other)
    hybrid.check_integrity()
    assert alone.stats().tables == 0
