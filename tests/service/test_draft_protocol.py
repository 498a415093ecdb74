"""The rules of the draft link over a real socket: steps, generations, leases, bad input."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_svc.host import DraftHost
from draft_svc.methods.base import REASON_NO_MATCH, REASON_SUPERSEDED
from specwire.errors import Reason, SpecwireError, from_rpc_error
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2
from tests.service.draft_peer import (
    LIMITS,
    TARGET,
    Link,
    Rows,
    Service,
    ToyMethod,
    advance_item,
    close_item,
    open_item,
    serving,
    session_key,
)

KEY = session_key()


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with serving(tmp_path) as running:
        yield running


async def test_ngram_proposes_what_followed_before(service: Service) -> None:
    link = service.link()
    ids = [5, 6, 7, 8, 9, 5, 6]
    reply = await link.ask(open_item(KEY, ids, method="ngram", target_fingerprint="any"))
    assert reply.opened.key == KEY and link.incarnation == service.host.incarnation
    reply = await link.ask(advance_item(KEY, 0, 7, [7], 4))
    assert list(reply.proposal.ids) == [8, 9, 5, 6] and reply.proposal.base_len == 8
    reply = await link.ask(advance_item(KEY, 1, 8, [1], 4))
    assert not reply.proposal.ids and reply.proposal.reason == REASON_NO_MATCH
    reply = await link.ask(advance_item(KEY, 2, 7, [7, 8], 2))  # back by two, forward by two
    assert list(reply.proposal.ids) == [9, 5] and reply.proposal.base_len == 9
    assert (await link.ask(close_item(KEY))).closed.key == KEY
    await service.idle()


async def test_info_names_every_handshake_field(service: Service) -> None:
    info = await service.stub.GetInfo(draft_pb2.DraftServiceGetInfoRequest())
    assert info.worker.protocol_major == 1 and info.worker.incarnation == service.host.incarnation
    ngram, toy = info.drafters
    assert ngram.method == "ngram" and not ngram.needs_rows and not ngram.HasField("row_format")
    assert toy.needs_rows and toy.is_default and toy.mask_token_id == 999
    assert list(toy.row_format.tap_ids) == [1, 3] and toy.row_format.width == 4
    assert toy.row_format.convention == common_pb2.TAP_CONVENTION_OUTPUT_OF_LAYER
    assert toy.row_format.dtype == common_pb2.D_TYPE_BFLOAT16
    assert toy.slot_mode == draft_pb2.SLOT_MODE_FILL_IN and toy.block_size == 6
    assert list(toy.layer_attention) == ["non-causal"] and toy.target_vocab_size == 1000


async def test_an_equal_step_gets_the_same_proposal_and_a_lower_one_nothing(
    service: Service,
) -> None:
    link, rows = service.link(), service.rows()
    await link.ask(open_item(KEY, [1, 2]))
    await rows.push(KEY, 3, 0, [10, 20])
    first = await link.ask(advance_item(KEY, 3, 2, [3], 2))
    again = await service.link().ask(advance_item(KEY, 3, 2, [3], 2))
    assert first == again and list(first.proposal.ids) == [20, 21]
    await link.silent(advance_item(KEY, 2, 2, [3], 2))
    assert service.host.metrics.value(
        "events", cause="stale_step"
    ) == 1 and service.toy.batches == [1]


async def test_a_repeat_joins_the_running_step_on_its_new_link(service: Service) -> None:
    link, rows = service.link(), service.rows()
    await link.ask(open_item(KEY, [1, 2]))
    await rows.push(KEY, 0, 0, [10, 20])
    service.toy.gate.clear()
    await link.silent(advance_item(KEY, 0, 2, [3], 1))
    await link.end()
    second = service.link()
    await second.silent(advance_item(KEY, 0, 2, [3], 1))
    service.toy.gate.set()
    assert list((await second.reply()).proposal.ids) == [20]
    assert service.toy.batches == [1]


async def test_a_higher_base_is_answered_with_the_length_it_has(service: Service) -> None:
    link = service.link()
    await link.ask(open_item(KEY, [1, 2, 3], method="ngram"))
    reply = await link.ask(advance_item(KEY, 0, 5, [9], 1))
    assert reply.refused.error.reason == Reason.NEED_TOKENS and reply.refused.have_len == 3
    assert reply.refused.step_id == 0
    reply = await link.ask(advance_item(KEY, 0, 3, [1, 2, 3], 1))
    assert list(reply.proposal.ids) == [1]


async def test_a_newer_step_supersedes_one_that_waits(service: Service) -> None:
    link, rows = service.link(), service.rows()
    await link.ask(open_item(KEY, [1, 2]))
    await link.send(advance_item(KEY, 0, 2, [3], 1, rows_count=2))
    await link.send(advance_item(KEY, 1, 3, [4], 1))
    reply = await link.reply()
    assert reply.proposal.step_id == 0 and reply.proposal.reason == REASON_SUPERSEDED
    await rows.push(KEY, 0, 0, [1, 2])
    await rows.push(KEY, 1, 2, [3])
    reply = await link.reply()
    assert reply.proposal.step_id == 1 and list(reply.proposal.ids) == [3]


async def test_generations_replace_each_other(service: Service) -> None:
    link = service.link()
    newer = session_key(generation=2)
    await link.ask(open_item(KEY, [1, 2]))
    reply = await link.ask(open_item(newer, [1, 2, 3]))
    assert reply.opened.key == newer
    reply = await link.ask(advance_item(KEY, 0, 2, [3], 1))
    assert reply.refused.error.reason == Reason.SESSION_UNKNOWN
    reply = await link.ask(open_item(KEY, [1, 2]))
    assert reply.refused.error.reason == Reason.STALE_STEP
    assert (await link.ask(close_item(KEY))).closed.key == KEY  # a late close of the old one
    assert (await service.load())[0] == 1 and len(service.toy.contexts) == 1
    assert (await link.ask(open_item(newer, [1, 2, 3]))).opened.key == newer  # a repeat
    assert len(service.toy.contexts) == 1
    assert (await link.ask(close_item(newer))).closed.key == newer
    assert (await link.ask(close_item(newer))).closed.key == newer
    await service.idle()


async def test_the_end_of_a_link_closes_nothing(service: Service) -> None:
    link, rows = service.link(), service.rows()
    await link.ask(open_item(KEY, [1, 2]))
    await link.end()
    await rows.push(KEY, 0, 0, [10, 20])
    reply = await service.link().ask(advance_item(KEY, 0, 2, [3], 1))
    assert list(reply.proposal.ids) == [20]


async def test_leases_end_sessions_and_heartbeats_renew_them(service: Service) -> None:
    link = service.link()
    kept, lost = session_key(1), session_key(2)
    await link.ask(open_item(kept, [1, 2], lease_ms=1000))
    await link.ask(open_item(lost, [1, 2], lease_ms=1000))
    beat = target_pb2.Heartbeat(coordinator=5, sessions=[kept, session_key(3)], lease_ms=1000)
    for _ in range(8):
        reply = await link.ask(draft_pb2.DraftItem(heartbeat=beat))
        assert list(reply.heartbeat_ack.unknown) == [session_key(3)]
        await asyncio.sleep(0.2)
    assert (await service.load())[0] == 1 and service.host.metrics.value(
        "events", cause="lease_expired"
    ) == 1
    await service.idle()


async def test_nothing_expires_in_the_middle_of_a_step(service: Service) -> None:
    link, rows = service.link(), service.rows()
    await link.ask(open_item(KEY, [1, 2], lease_ms=50))
    await rows.push(KEY, 0, 0, [10, 20])
    service.toy.gate.clear()
    await link.send(advance_item(KEY, 0, 2, [3], 1))
    await asyncio.sleep(0.4)
    assert (await service.load())[0] == 1
    service.toy.gate.set()
    assert list((await link.reply()).proposal.ids) == [20]
    await service.idle()


async def test_a_deadline_ends_the_session(service: Service) -> None:
    await service.link().ask(open_item(KEY, [1, 2], deadline_ms=50))
    await service.idle()


async def test_a_close_during_a_step_frees_everything(service: Service) -> None:
    link, rows = service.link(), service.rows()
    await link.ask(open_item(KEY, [1, 2]))
    await rows.push(KEY, 0, 0, [10, 20])
    service.toy.gate.clear()
    await link.send(advance_item(KEY, 0, 2, [3], 1))
    await service.computing()
    assert (await link.ask(close_item(KEY))).closed.key == KEY
    service.toy.gate.set()
    await service.idle()
    assert service.host.metrics.value("events", cause="late_proposal") == 1


async def test_sessions_that_are_ready_share_one_forward(service: Service) -> None:
    link, rows = service.link(), service.rows()
    keys = [session_key(number) for number in range(1, 5)]
    for key in keys:
        await link.ask(open_item(key, [1, 2]))
        await rows.push(key, 0, 0, [10, 20 * key.session_id])
    service.toy.gate.clear()
    await link.silent(advance_item(keys[0], 0, 2, [3], 1))
    await service.computing()
    await link.silent(advance_item(keys[1], 0, 2, [3], 1))
    await link.silent(advance_item(keys[2], 0, 2, [3], 1))
    await link.silent(advance_item(keys[3], 0, 2, [3], 1))
    service.toy.gate.set()
    proposals = [(await link.reply()).proposal for _ in keys]
    assert [list(p.ids) for p in proposals] == [[20], [40], [60], [80]]
    assert service.toy.batches == [1, 3]


async def _busy(service: Service, link: Link, rows: Rows) -> None:
    """Both sessions are open with the rows of their prompt; the second one's forward runs."""
    for key in (KEY, session_key(2)):
        await link.ask(open_item(key, [1, 2]))
        await rows.push(key, 0, 0, [10, 20])
    service.toy.gate.clear()
    await link.send(advance_item(session_key(2), 0, 2, [3], 1))
    await service.computing()


async def test_a_superseded_question_is_not_computed(service: Service) -> None:
    """A slow forward must not be followed by one for questions that have had their answer."""
    link, rows = service.link(), service.rows()
    await _busy(service, link, rows)
    await link.silent(advance_item(KEY, 0, 2, [3], 1))
    await rows.push(KEY, 1, 2, [30])
    first = (await link.ask(advance_item(KEY, 1, 3, [4], 1))).proposal
    assert (first.step_id, first.reason) == (0, "superseded")
    service.toy.gate.set()
    assert (await link.reply()).proposal.key == session_key(2)
    assert list((await link.reply()).proposal.ids) == [30]
    assert service.toy.batches == [1, 1]


async def test_a_question_whose_time_is_over_is_not_computed(service: Service) -> None:
    link, rows = service.link(), service.rows()
    await _busy(service, link, rows)
    await link.silent(advance_item(KEY, 0, 2, [3], 1, deadline_ms=20))
    await asyncio.sleep(0.05)
    service.toy.gate.set()
    assert (await link.reply()).proposal.key == session_key(2)
    late = (await link.reply()).proposal
    assert (late.key, late.reason, list(late.ids)) == (KEY, "deadline", [])
    assert service.toy.batches == [1]
    await rows.push(KEY, 1, 2, [30])
    again = await link.ask(advance_item(KEY, 1, 3, [4], 1))
    assert list(again.proposal.ids) == [30]


async def test_a_malformed_item_fails_alone(service: Service) -> None:
    link = service.link()
    await link.ask(open_item(KEY, [1, 2], method="toy", max_draft_tokens=2))
    cases = {
        "empty": (draft_pb2.DraftItem(), Reason.FIELD_INVALID),
        "no ids": (open_item(session_key(2), []), Reason.FIELD_INVALID),
        "odd ids": (
            draft_pb2.DraftItem(open=draft_pb2.OpenDraft(key=session_key(2), ids=b"abc")),
            Reason.FIELD_INVALID,
        ),
        "method": (open_item(session_key(2), [1], method="magic"), Reason.METHOD_UNKNOWN),
        "target": (
            open_item(session_key(2), [1], target_fingerprint="target-b"),
            Reason.MODEL_MISMATCH,
        ),
        "vocabulary": (open_item(session_key(2), [1000]), Reason.VOCAB_RANGE),
        "top_p": (
            open_item(session_key(2), [1], sampling=common_pb2.Sampling(top_p=1.5)),
            Reason.FIELD_INVALID,
        ),
        "token": (advance_item(KEY, 0, 2, [1000], 1), Reason.VOCAB_RANGE),
        "base": (advance_item(KEY, 0, 0, [1], 1), Reason.FIELD_INVALID),
        "session": (advance_item(session_key(2), 0, 1, [1], 1), Reason.SESSION_UNKNOWN),
    }
    for name, (item, reason) in cases.items():
        reply = await link.ask(item)
        assert reply.refused.error.reason == reason, name
        assert reply.refused.error.message, name
    await service.rows().push(KEY, 0, 0, [10, 20])
    reply = await link.ask(advance_item(KEY, 0, 2, [3], 5))
    assert list(reply.proposal.ids) == [20, 21] and reply.proposal.reason == "k_limit"


async def test_a_bug_in_a_method_costs_one_round(service: Service) -> None:
    link, rows = service.link(), service.rows()
    await link.ask(open_item(KEY, [1, 2]))
    await rows.push(KEY, 0, 0, [10, 20])
    service.toy.broken = True
    reply = await link.ask(advance_item(KEY, 0, 2, [3], 1))
    assert reply.refused.error.reason == Reason.INTERNAL
    assert "a bug" not in reply.refused.error.message
    service.toy.broken = False
    await rows.push(KEY, 1, 2, [30])
    reply = await link.ask(advance_item(KEY, 1, 3, [4], 1))
    assert list(reply.proposal.ids) == [30]


async def test_sampling_reaches_the_method_with_its_defaults(service: Service) -> None:
    link = service.link()
    await link.ask(open_item(KEY, [1, 2]))
    message = common_pb2.Sampling(temperature=0.0, top_k=3, top_p=0.5, seed=2**63, choice=2)
    await link.ask(open_item(session_key(2), [1, 2], sampling=message))
    first, second = (context.sampling for context in service.toy.contexts)
    assert (first.temperature, first.top_k, first.top_p, first.seed) == (1.0, 0, 1.0, 0)
    assert (second.temperature, second.top_k, second.top_p) == (0.0, 3, 0.5)
    assert (second.seed, second.choice) == (2**63, 2)


async def test_there_is_a_limit_of_sessions(tmp_path: Path) -> None:
    async with serving(tmp_path, dataclasses.replace(LIMITS, max_sessions=1)) as service:
        link = service.link()
        await link.ask(open_item(KEY, [1, 2]))
        reply = await link.ask(open_item(session_key(2), [1, 2]))
        assert reply.refused.error.reason == Reason.QUEUE_FULL
        assert reply.refused.error.retry_after_ms > 0
        newer = session_key(generation=2)
        assert (await link.ask(open_item(newer, [1, 2]))).opened.key == newer


async def test_a_restarted_service_knows_nobody_and_has_a_new_name(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        link = service.link()
        await link.ask(open_item(KEY, [1, 2]))
        before = link.incarnation
    async with serving(tmp_path) as service:
        link = service.link()
        reply = await link.ask(advance_item(KEY, 0, 2, [3], 1))
        assert reply.refused.error.reason == Reason.SESSION_UNKNOWN
        assert link.incarnation not in (0, before)
        ack = await service.rows(TARGET).push(KEY, 0, 0, [1])
        assert ack.error.reason == Reason.SESSION_UNKNOWN


async def test_health_turns_to_serving_when_everything_is_loaded(tmp_path: Path) -> None:
    loading, release = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def load() -> dict[str, ToyMethod]:
        loop.call_soon_threadsafe(loading.set)
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(10)
        return {"toy": ToyMethod()}

    address = f"unix:{tmp_path}/draft.sock"
    host = DraftHost(load, address=address, limits=LIMITS, default_method="toy")
    entering = asyncio.create_task(host.__aenter__())
    await loading.wait()
    async with grpc.aio.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        request = health_pb2.HealthCheckRequest(service="specwire.v1.DraftService")
        assert (await check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await draft_pb2_grpc.DraftServiceStub(channel).GetInfo(
                draft_pb2.DraftServiceGetInfoRequest()
            )
        assert from_rpc_error(caught.value).reason is Reason.ENGINE_DOWN
        release.set()
        await entering
        assert (await check(request)).status == health_pb2.HealthCheckResponse.SERVING
    await host.__aexit__()


async def test_a_failed_load_is_raised_where_the_service_starts(tmp_path: Path) -> None:
    def load() -> dict[str, ToyMethod]:
        raise SpecwireError(Reason.CHECKPOINT_INVALID, "no such draft")

    host = DraftHost(
        load, address=f"unix:{tmp_path}/draft.sock", limits=LIMITS, default_method="toy"
    )
    with pytest.raises(SpecwireError, match="no such draft"):
        await host.__aenter__()


async def test_draining_waits_for_sessions_and_for_no_idle_link(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        service.host._drain_s = 60.0
        link, key = service.link(), session_key()
        assert (await link.ask(open_item(key, [1, 2, 3]))).HasField("opened")
        stopping = asyncio.ensure_future(service.host.__aexit__())
        refused = await link.ask(open_item(session_key(2), [1, 2, 3]))
        assert refused.refused.error.reason == "DRAINING" and not stopping.done()
        await link.send(close_item(key))
        await asyncio.wait_for(stopping, 3)


async def test_draining_waits_for_those_only_whose_coordinator_is_there(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        service.host._drain_s = 60.0
        lost, link, key = service.link(), service.link(), session_key(coordinator=6)
        assert (await lost.ask(open_item(session_key(), [1, 2, 3]))).HasField("opened")
        assert (await link.ask(open_item(key, [1, 2, 3]))).HasField("opened")
        lost._call.cancel()
        stopping = asyncio.ensure_future(service.host.__aexit__())
        await asyncio.sleep(0.4)
        assert not stopping.done()
        assert (await link.ask(close_item(key))).HasField("closed")
        await asyncio.wait_for(stopping, 0.5)


async def test_draining_waits_for_a_coordinator_that_connects_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        service.host._drain_s = 60.0
        lost, key = service.link(), session_key()
        assert (await lost.ask(open_item(key, [1, 2, 3]))).HasField("opened")
        lost._call.cancel()
        stopping = asyncio.ensure_future(service.host.__aexit__())
        await asyncio.sleep(0.1)
        link = service.link()
        assert (await link.ask(advance_item(key, 1, 3, [4], 0))).HasField("proposal")
        await asyncio.sleep(0.4)
        assert not stopping.done()
        await link.send(close_item(key))
        await asyncio.wait_for(stopping, 3)
