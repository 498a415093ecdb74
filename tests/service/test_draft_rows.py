"""Hidden-state rows over a real link: provisional, gaps, late, foreign, waited for."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from draft_svc.methods.base import REASON_DEADLINE, REASON_ROWS_MISSING
from specwire.errors import Reason
from specwire.v1 import common_pb2
from tests.service.draft_peer import (
    LIMITS,
    PROJECTED,
    WIDTH,
    Link,
    Rows,
    Service,
    advance_item,
    open_item,
    serving,
    session_key,
)

KEY = session_key()


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with serving(tmp_path) as running:
        yield running


async def opened(service: Service, ids: int = 4) -> tuple[Link, Rows]:
    link, rows = service.link(), service.rows()
    reply = await link.ask(open_item(KEY, range(ids)))
    assert reply.opened.have_rows == 0
    return link, rows


async def test_rows_become_proposals_round_after_round(service: Service) -> None:
    link, rows = await opened(service)
    assert not (await rows.push(KEY, 0, 0, [10, 20])).HasField("error")
    assert not (await rows.push(KEY, 0, 2, [30, 40])).HasField("error")
    reply = await link.ask(advance_item(KEY, 0, 4, [7], 3, rows_count=4))
    assert list(reply.proposal.ids) == [40, 41, 42] and reply.proposal.base_len == 5
    assert list(reply.proposal.confidences) == [0.5] * 3 and reply.proposal.reason == ""
    await rows.push(KEY, 1, 4, [50, 60])
    reply = await link.ask(advance_item(KEY, 1, 5, [8, 9], 2, rows_start=4, rows_count=2))
    assert list(reply.proposal.ids) == [60, 61] and reply.proposal.base_len == 7
    (context,) = service.toy.contexts
    assert context.ids == [0, 1, 2, 3, 7, 8, 9]
    assert [context.rows[p][0] for p in range(6)] == [10, 20, 30, 40, 50, 60]


async def test_rows_of_another_step_do_not_count(service: Service) -> None:
    link, rows = await opened(service)
    await rows.push(KEY, 0, 0, [1, 2, 3, 4])
    await link.ask(advance_item(KEY, 0, 4, [7], 1))
    await rows.push(KEY, 5, 4, [99])
    reply = await link.ask(advance_item(KEY, 1, 5, [8], 1))
    assert reply.proposal.reason == REASON_ROWS_MISSING and not reply.proposal.ids
    assert service.toy.contexts[0].rows.keys() == {0, 1, 2, 3}
    # Rows of a step that was passed over are refused, by name.
    ack = await rows.push(KEY, 0, 4, [5])
    assert not ack.HasField("error")  # step 0 is known; nothing of [4, 5) is committed by it
    reply = await link.ask(advance_item(KEY, 7, 6, [9], 1))
    assert reply.proposal.reason == REASON_ROWS_MISSING
    ack = await rows.push(KEY, 6, 4, [5])
    assert ack.error.reason == Reason.ROWS_REFUSED and ack.error.metadata["cause"] == "stale_step"
    assert service.host.metrics.value("events", cause="rows_stale_step") == 1


async def test_a_gap_is_refused_and_the_rows_may_be_sent_again(service: Service) -> None:
    """DF-38: rows come with start and count, and what is missing is seen."""
    link, rows = await opened(service)
    await rows.push(KEY, 0, 0, [1, 2])
    ack = await rows.push(KEY, 0, 3, [4])
    assert ack.error.metadata["cause"] == "gap"
    reply = await link.ask(advance_item(KEY, 0, 4, [7], 1))
    assert reply.proposal.reason == REASON_ROWS_MISSING
    assert not (await rows.push(KEY, 0, 2, [3, 4])).HasField("error")
    reply = await link.ask(advance_item(KEY, 1, 5, [], 1))
    assert list(reply.proposal.ids) == [4]


async def test_an_advance_waits_for_its_rows(service: Service) -> None:
    link, rows = await opened(service)
    await link.send(advance_item(KEY, 0, 4, [7], 2, rows_count=4))
    await asyncio.sleep(0.05)
    await rows.push(KEY, 0, 0, [1, 2])
    await rows.push(KEY, 0, 2, [3, 4])
    reply = await link.reply()
    assert list(reply.proposal.ids) == [4, 5] and reply.proposal.timings.queue_ns > 40_000_000


async def test_waiting_ends_at_the_limit_and_at_the_deadline(service: Service) -> None:
    link, _ = await opened(service)
    began = time.monotonic()
    reply = await link.ask(advance_item(KEY, 0, 4, [7], 2))
    assert reply.proposal.reason == REASON_ROWS_MISSING
    assert time.monotonic() - began > 0.9
    began = time.monotonic()
    reply = await link.ask(advance_item(KEY, 1, 5, [8], 2, deadline_ms=20))
    assert reply.proposal.reason == REASON_DEADLINE and time.monotonic() - began < 0.9
    began = time.monotonic()
    reply = await link.ask(advance_item(KEY, 2, 6, [8], 2, rows_count=0))
    assert reply.proposal.reason == REASON_ROWS_MISSING and time.monotonic() - began < 0.9


async def test_late_rows_repair_the_context(service: Service) -> None:
    link, rows = await opened(service)
    reply = await link.ask(advance_item(KEY, 0, 4, [7], 2, deadline_ms=10))
    assert not reply.proposal.ids
    await rows.push(KEY, 0, 0, [1, 2, 3, 4])
    await rows.push(KEY, 1, 4, [5])
    reply = await link.ask(advance_item(KEY, 1, 5, [8], 2))
    assert list(reply.proposal.ids) == [5, 6]


async def test_rounds_without_a_proposal_keep_the_context_current(service: Service) -> None:
    """WC-14: K = 3, 0, 0, 3; the rounds between leave no hole in the context."""
    link, rows = await opened(service)
    await rows.push(KEY, 0, 0, [1, 2, 3, 4])
    for step, k in enumerate([3, 0, 0, 3]):
        reply = await link.ask(advance_item(KEY, step, 4 + step, [7], k))
        assert len(reply.proposal.ids) == k and reply.proposal.base_len == 5 + step
        await rows.push(KEY, step + 1, 4 + step, [50 + step])
    assert list(reply.proposal.ids) == [52, 53, 54]


async def test_coverage_may_start_late(service: Service) -> None:
    link, rows = await opened(service)
    await rows.push(KEY, 0, 2, [3, 4])
    reply = await link.ask(advance_item(KEY, 0, 4, [7], 1))
    assert list(reply.proposal.ids) == [4]


async def test_a_draft_that_joins_late_takes_rows_of_older_steps(service: Service) -> None:
    link, rows = await opened(service, ids=4)
    await rows.push(KEY, 6, 0, [1, 2, 3])
    await rows.push(KEY, 7, 3, [4])
    reply = await link.ask(advance_item(KEY, 7, 4, [9], 1))
    assert list(reply.proposal.ids) == [4]


async def test_a_draft_that_is_opened_before_its_target_takes_all_rows_of_the_open(
    service: Service,
) -> None:
    """A session that is called back: its text went on meanwhile."""
    link, rows = await opened(service)
    await rows.push(KEY, 0, 0, [1, 2, 3, 4, 5, 6, 7])
    reply = await link.ask(advance_item(KEY, 0, 4, [7, 8, 9, 10], 2, rows_count=7))
    assert list(reply.proposal.ids) == [7, 8] and reply.proposal.base_len == 8
    assert service.toy.contexts[0].rows.keys() == set(range(7))


async def test_a_lower_base_truncates_rows_too(service: Service) -> None:
    link, rows = await opened(service)
    await rows.push(KEY, 0, 0, [1, 2, 3, 4])
    await link.ask(advance_item(KEY, 0, 4, [7], 1))
    await rows.push(KEY, 1, 4, [5, 6, 7])
    await link.ask(advance_item(KEY, 1, 5, [8, 9, 10], 1))
    await rows.push(KEY, 2, 5, [66])
    reply = await link.ask(advance_item(KEY, 2, 6, [11], 1))
    assert list(reply.proposal.ids) == [66] and reply.proposal.base_len == 7
    assert service.toy.contexts[0].ids == [0, 1, 2, 3, 7, 8, 11]


async def test_rows_nobody_asked_for_are_refused(service: Service) -> None:
    link, rows = await opened(service)
    refused = {
        "unknown session": await rows.push(session_key(9), 0, 0, [1]),
        "older generation": await rows.push(session_key(1, 0), 0, 0, [1]),
        "wrong width": await rows.push(KEY, 0, 0, [1], width=3),
        "no rows": await rows.push(KEY, 0, 0, []),
        "another target": await service.rows(target=78).push(KEY, 0, 0, [1]),
    }
    assert {name: ack.error.reason for name, ack in refused.items()} == {
        "unknown session": Reason.SESSION_UNKNOWN,
        "older generation": Reason.SESSION_UNKNOWN,
        "wrong width": Reason.ROWS_REFUSED,
        "no rows": Reason.ROWS_REFUSED,
        "another target": Reason.ROWS_REFUSED,
    }
    ngram_key = session_key(2)
    await link.ask(open_item(ngram_key, [1, 2], method="ngram"))
    assert (await rows.push(ngram_key, 0, 0, [1])).error.metadata["cause"] == "not_needed"
    # The streams live on and the session still works.
    await rows.push(KEY, 0, 0, [1, 2, 3, 4])
    reply = await link.ask(advance_item(KEY, 0, 4, [7], 1))
    assert list(reply.proposal.ids) == [4]


async def test_a_session_holds_a_limited_amount_of_unconfirmed_rows(tmp_path: Path) -> None:
    limits = dataclasses.replace(LIMITS, rows_buffer_bytes=24)
    async with serving(tmp_path, limits) as service:
        link, rows = await opened(service)
        await rows.push(KEY, 0, 0, [1, 2, 3])
        assert (await rows.push(KEY, 0, 3, [4])).error.metadata["cause"] == "overflow"
        await link.ask(advance_item(KEY, 0, 4, [7], 0))
        assert not (await rows.push(KEY, 0, 3, [4])).HasField("error")
        reply = await link.ask(advance_item(KEY, 1, 5, [], 1))
        assert list(reply.proposal.ids) == [4]


async def test_a_session_of_projected_rows(service: Service) -> None:
    """Beside one of the layers' own: each is held to its width, whatever comes."""
    link, rows = await opened(service)
    other = session_key(2)
    encoding = common_pb2.ROW_ENCODING_PROJECTED
    reply = await link.ask(open_item(other, range(4), row_encoding=encoding))
    assert reply.HasField("opened")
    refused = await rows.push(other, 0, 0, [1, 2, 3, 4], width=WIDTH)
    assert refused.error.reason == "ROWS_REFUSED" and refused.error.metadata["cause"] == "width"
    assert (await rows.push(KEY, 0, 0, [1, 2, 3, 4], width=PROJECTED)).HasField("error")
    assert not (await rows.push(other, 0, 0, [1, 2, 3, 40], width=PROJECTED)).HasField("error")
    reply = await link.ask(advance_item(other, 0, 4, [7], 2, rows_count=4))
    assert list(reply.proposal.ids) == [40, 41]
    assert service.toy.contexts[1].projected == {True}
    await rows.push(KEY, 0, 0, [1, 2, 3, 4])
    await link.ask(advance_item(KEY, 0, 4, [7], 2, rows_count=4))
    assert service.toy.contexts[0].projected == {False}


@pytest.mark.parametrize(("method", "encoding"), [("toy", 3), ("ngram", 2)])
async def test_an_encoding_that_is_not_read(service: Service, method: str, encoding: int) -> None:
    link = service.link()
    reply = await link.ask(open_item(KEY, range(4), method=method, row_encoding=encoding))
    error = reply.refused.error
    assert error.reason == "ROWS_REFUSED" and error.metadata["field"] == "row_encoding"
    accepted = "ROW_ENCODING_TAPS (1)"
    if method == "toy":
        accepted += " or ROW_ENCODING_PROJECTED (2)"
    assert error.metadata["accepted"] == accepted and error.metadata["value"] == str(encoding)
