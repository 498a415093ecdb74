"""Hostile peers of a draft service: what they send fails alone and leaves nothing behind."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from draft_svc.host import DraftHost
from draft_svc.methods.base import AnyMethod
from draft_svc.methods.draft_model import DraftModelMethod
from draft_svc.methods.hybrid import HybridMethod
from draft_svc.methods.ngram import NgramMethod
from specwire.errors import Reason
from specwire.rpc import channel_options
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2
from tests.engine.tiny import KERNELS, VOCAB, load_tiny, random_ids, write_llama
from tests.service.draft_peer import (
    LIMITS,
    TARGET,
    Link,
    Rows,
    Service,
    advance_item,
    close_item,
    open_item,
    serving,
    session_key,
)

HONEST = session_key(1000, coordinator=1)
HUGE = 2**32 - 1
EXTREMES = (0, 1, 2, 3, 7, 64, 999, 1000, 2**31, HUGE)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    limits = dataclasses.replace(LIMITS, max_sessions=1000, lease_ms=500)
    async with serving(tmp_path, limits) as running:
        yield running


async def settled(service: Service) -> None:
    """No session and no context is left."""
    await service.idle()
    assert not service.toy.contexts


async def honest_round(link: Link, rows: Rows, step: int) -> None:
    """The session that must not notice anything."""
    if step == 0:
        await link.ask(open_item(HONEST, [1, 2, 3], lease_ms=60_000))
        await rows.push(HONEST, 0, 0, [9, 9])
    await rows.push(HONEST, step, 2 + step, [30 + step])
    reply = await link.ask(advance_item(HONEST, step, 3 + step, [5], 2))
    assert list(reply.proposal.ids) == [30 + step, 31 + step], step


def random_key(chance: random.Random) -> Any:
    return session_key(
        chance.choice((1, 2, 3, 2**64 - 1)),
        chance.choice((0, 1, 2, HUGE)),
        chance.choice((5, 6, 2**64 - 1)),
    )


def random_item(chance: random.Random) -> draft_pb2.DraftItem:
    key, pick = random_key(chance), chance.choice
    kind = pick(("open", "advance", "close", "heartbeat", "empty"))
    if kind == "open":
        ids = [pick((0, 1, 2, 3, 4, 5, 999, 1000, HUGE)) for _ in range(pick((0, 1, 5)))]
        sampling = common_pb2.Sampling(
            temperature=pick((0.0, 0.5, 1.0, 2.0, -1.0, float("nan"), float("inf"))),
            top_p=pick((1.0, 0.9, 0.5, 0.1, 0.0, 7.0, float("nan"))),
            top_k=pick(EXTREMES),
            seed=2**64 - 1,
            choice=pick(EXTREMES),
        )
        item = open_item(
            key,
            ids,
            pick(("toy", "ngram", "", "\N{SKULL}")),
            sampling=sampling,
            max_draft_tokens=pick(EXTREMES),
            lease_ms=pick((0, 1, 500)),
        )
        if chance.random() < 0.3:
            item.open.ids = chance.randbytes(pick((1, 3, 6)))
        return item
    if kind == "advance":
        tokens = [pick(EXTREMES) for _ in range(pick((0, 1, 3)))]
        numbers = {
            name: pick(EXTREMES) for name in ("deadline_ms", "rows_start", "rows_count", "k")
        }
        return advance_item(
            key, pick(EXTREMES), pick(EXTREMES), tokens, numbers.pop("k"), **numbers
        )
    if kind == "close":
        return close_item(key)
    if kind == "heartbeat":
        beat = target_pb2.Heartbeat(coordinator=5, sessions=[key] * 3, lease_ms=pick((0, 1, 500)))
        return draft_pb2.DraftItem(heartbeat=beat)
    return draft_pb2.DraftItem()


def random_chunk(chance: random.Random) -> draft_pb2.FeatureChunk:
    count = chance.choice(EXTREMES)
    data = chance.randbytes(8 * min(count, 8) + chance.choice((0, 0, 1)))
    return draft_pb2.FeatureChunk(
        key=random_key(chance),
        step_id=chance.choice(EXTREMES),
        start=chance.choice(EXTREMES),
        count=count,
        rows=data,
    )


@pytest.mark.parametrize("seed", range(3))
async def test_random_items_hurt_nobody(service: Service, seed: int) -> None:
    """WC-13, DF-36: ids out of range, foreign and stale keys, rows of any shape, in any order."""
    chance = random.Random(seed)
    honest, rows = service.link(), service.rows()
    hostile, push = service.stub.Link(), service.stub.PushFeatures()
    for step in range(20):
        items = [random_item(chance) for _ in range(40)]
        await hostile.write(draft_pb2.DraftServiceLinkRequest(items=items))
        chunks = [random_chunk(chance) for _ in range(20)]
        target = chance.choice((0, TARGET, 2**64 - 1))
        await push.write(draft_pb2.PushFeaturesRequest(target_incarnation=target, chunks=chunks))
        acks = (await push.read()).acks
        assert [ack.credit_bytes for ack in acks] == [len(chunk.rows) for chunk in chunks]
        await honest_round(honest, rows, step)
    hostile.cancel()
    push.cancel()
    await honest.ask(close_item(HONEST))
    assert service.host.metrics.value("events", cause="session_unknown") > 0
    assert service.host.metrics.value("events", cause="need_tokens") > 0, "no session was open"
    await settled(service)


async def test_a_frame_beyond_the_limit_ends_its_link_only(service: Service) -> None:
    """WC-1: 16 MiB are the limit of a link, and it is named."""
    honest, rows = service.link(), service.rows()
    await honest_round(honest, rows, 0)
    giant = open_item(session_key(7), [])
    giant.open.ids = bytes(17 << 20)
    unlimited = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(service.host.address, options=unlimited) as channel:
        call = draft_pb2_grpc.DraftServiceStub(channel).Link()
        await call.write(draft_pb2.DraftServiceLinkRequest(items=[giant]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(16 << 20) in str(caught.value.details())
    await honest_round(honest, rows, 1)


async def test_a_frame_of_many_items_is_answered_item_by_item(service: Service) -> None:
    """64 sessions in one frame, one of them malformed: 64 answers, one refusal."""
    link = service.link()
    keys = [session_key(number) for number in range(1, 65)]
    bad = 20
    opens = [open_item(key, [1, 2]) for key in keys]
    opens[bad] = open_item(keys[bad], [1, HUGE])
    await link.send(*opens)
    replies = [await link.reply() for _ in keys]
    refused = [reply.refused for reply in replies if reply.HasField("refused")]
    assert [r.key for r in refused] == [keys[bad]]
    assert refused[0].error.reason == Reason.VOCAB_RANGE
    rows = service.rows()
    for key in keys:
        if key != keys[bad]:
            await rows.push(key, 0, 0, [1, key.session_id])
    await link.send(*(advance_item(key, 0, 2, [3], 1) for key in keys))
    answers = {}
    for _ in keys:
        reply = await link.reply()
        body = getattr(reply, str(reply.WhichOneof("reply")))
        answers[body.key.session_id] = reply
    lost = answers.pop(keys[bad].session_id)
    assert lost.refused.error.reason == Reason.SESSION_UNKNOWN
    assert {number: list(a.proposal.ids) for number, a in answers.items()} == {
        number: [number] for number in answers
    }
    assert len(service.toy.batches) < 10, "ready sessions did not share forwards"


async def test_replies_for_older_generations_change_nothing(service: Service) -> None:
    """WC-5, WC-11, WC-36: late items of generation 1 leave generation 2 alone."""
    link, rows = service.link(), service.rows()
    old, new = session_key(1, 1), session_key(1, 2)
    await link.ask(open_item(old, [1, 2]))
    await link.ask(open_item(new, [4, 5]))
    assert (await link.ask(close_item(old))).HasField("closed")
    assert (await link.ask(close_item(old))).HasField("closed")
    stale = await link.ask(advance_item(old, 5, 2, [3], 1))
    assert stale.refused.error.reason == Reason.SESSION_UNKNOWN
    assert (await rows.push(old, 0, 0, [7, 7])).error.reason == Reason.SESSION_UNKNOWN
    reopened = await link.ask(open_item(old, [1, 2]))
    assert reopened.refused.error.reason == Reason.STALE_STEP
    await rows.push(new, 0, 0, [10, 20])
    assert list((await link.ask(advance_item(new, 0, 2, [3], 1))).proposal.ids) == [20]


async def test_churn_leaves_no_page_behind(tmp_path: Path) -> None:
    """WC-8: sessions of every kind of end, against a model with pages of its own."""
    write_llama(tmp_path / "model")
    engine = load_tiny(tmp_path / "model", KERNELS[0], kv_pages=200)
    model = DraftModelMethod(engine, max_draft_tokens=4, tokenizer_hash="", chunk_tokens=64)
    lookup = NgramMethod(min_n=2, max_n=4, max_draft_tokens=4)
    methods: dict[str, AnyMethod] = {
        "draft_model": model,
        "hybrid": HybridMethod(lookup, model, owns_neural=False),
    }
    address = f"unix:{tmp_path}/draft.sock"
    limits = dataclasses.replace(LIMITS, max_sessions=400)
    host = DraftHost(lambda: methods, address=address, limits=limits, default_method="hybrid")
    chance = random.Random(1)
    async with (
        host,
        grpc.aio.insecure_channel(address, options=channel_options(link=True)) as channel,
    ):
        stub = draft_pb2_grpc.DraftServiceStub(channel)

        async def session(number: int) -> None:
            link, key = Link(stub), session_key(number)
            method = chance.choice(list(methods))
            ids = random_ids(chance.randint(1, 60), seed=number % 7)
            lease = chance.choice((100, 5000))
            await link.ask(open_item(key, ids, method, lease_ms=lease))
            for step in range(chance.randint(0, 5)):
                token = chance.randrange(3, VOCAB)
                item = advance_item(key, step, len(ids), [token], chance.randint(0, 4))
                if chance.random() < 0.1:
                    await link.send(item)  # and gone
                    return
                await link.ask(item)
                ids.append(token)
            end = chance.choice(("close", "replace", "vanish"))
            if end == "replace":
                again = session_key(number, 2)
                await link.ask(open_item(again, ids[:1], method, lease_ms=100))
            elif end == "close":
                await link.ask(close_item(key))

        for at in range(0, 300, 50):
            await asyncio.gather(*(session(number) for number in range(at, at + 50)))
        async with asyncio.timeout(20):
            while host.worker.stats.tables or len(host.protocol.sessions):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    engine.check_integrity()
    assert engine.stats().free == engine.stats().total
