"""Lost, slow and restarted workers, deadlines and clients that leave."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from coordinator.session import Session
from coordinator.validation import check
from specwire.errors import Reason, SpecwireError
from specwire.v1 import common_pb2, draft_pb2, generate_pb2
from tests.service.coordinator_harness import (
    PROMPT,
    Reply,
    ScriptedDraft,
    World,
    perfect,
    proposal,
    public_stub,
    refusal,
    row_drafter,
    world,
)
from tests.service.fleet_harness import until
from tests.service.toy_engine import continuation

SLOW = {"step_s": 0.01}
LONG = 120


def request(tokens: int = LONG) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        tokens=generate_pb2.TokenInput(ids=PROMPT),
        sampling=common_pb2.Sampling(temperature=0.0, seed=0),
        max_tokens=tokens,
        return_token_ids=True,
    )


async def started(made: World, tokens: int = LONG, **options: Any) -> asyncio.Task[Any]:
    """A generation that has made its first verify steps."""
    task = asyncio.create_task(made.generate(max_tokens=tokens, **options))
    async with asyncio.timeout(5):
        sessions = made.host.servicer.sessions
        while not any(s.emitted >= 10 for s in sessions.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return task


@pytest.mark.parametrize("rows", [False, True])
async def test_a_draft_that_is_killed_and_restarted(rows: bool) -> None:
    """WC-26: speculation is back soon after the draft is."""
    draft = ScriptedDraft(**(row_drafter() if rows else {}))
    async with world(draft, SLOW, num_speculative_tokens=2) as made:
        task = await started(made)
        await draft.stop()
        await asyncio.sleep(0.3)
        before = len(draft.advances)
        await made.start_draft()
        result = await task
        assert list(result.token_ids) == continuation(PROMPT, LONG)
        assert result.acceptance.fallbacks["draft_lost"] >= 1
        assert len(draft.opens) == 2
        assert len(draft.advances) > before + 5
        # Speculation is back: the last steps were drafted and accepted.
        assert result.acceptance.per_step_accepted[-4] == 2
        await made.until_idle()


async def test_without_a_draft_the_session_is_plain() -> None:
    draft = ScriptedDraft()
    async with world(draft) as made:
        await made.generate()
        await draft.stop()
        await asyncio.sleep(0.1)
        result = await made.generate(method="toy")
        assert list(result.token_ids) == continuation(PROMPT, 40)
        assert result.acceptance.fallbacks["draft_down"] == 1
        await made.start_draft()


async def test_one_refusal_does_not_end_drafting() -> None:
    """WC-12: one failed exchange does not disable drafting for the request."""

    def script(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
        if item.step_id == 2:
            return [refusal(item, "SESSION_UNKNOWN")]
        return perfect(draft, item, ids)

    draft = ScriptedDraft(script)
    async with world(draft, num_speculative_tokens=2) as made:
        result = await made.generate(max_tokens=60)
        assert list(result.token_ids) == continuation(PROMPT, 60)
        assert result.acceptance.fallbacks == {"session_unknown": 1}
        assert result.acceptance.per_step_accepted[-3] == 2


async def test_a_draft_that_lost_tokens_is_told_again() -> None:
    def script(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
        if item.step_id != 2:
            return perfect(draft, item, ids)
        reply = refusal(item, "NEED_TOKENS")
        reply.refused.have_len = 3
        del draft.sessions[item.key.session_id, item.key.generation][3:]
        return [reply]

    draft = ScriptedDraft(script)
    async with world(draft, num_speculative_tokens=2) as made:
        result = await made.generate()
        assert list(result.token_ids) == continuation(PROMPT, 40)
        assert [a.base_len for a in draft.advances if a.step_id == 3] == [3]
        assert len(draft.opens) == 1
        assert result.acceptance.per_step_accepted[4] == 2


async def test_a_silent_draft_trips_its_breaker_and_is_tried_again() -> None:
    """WC-31: a draft that stops answering costs a bounded wait, and then none."""
    silent = {"on": True}

    def script(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
        return [] if silent["on"] or not item.k else perfect(draft, item, ids)

    options: dict[str, Any] = {
        "proposal_wait_min_ms": 20,
        "breaker_lates": 3,
        "breaker_open_ms": 150,
        "num_speculative_tokens": 2,
    }
    async with world(ScriptedDraft(script), SLOW, **options) as made:
        task = await started(made)
        assert made.host.fleet.drafts[0].standings["toy"].breaker.open
        silent["on"] = False
        result = await task
        assert list(result.token_ids) == continuation(PROMPT, LONG)
        assert 3 <= result.acceptance.fallbacks["late"] <= 6
        assert result.acceptance.fallbacks["breaker_open"] > 3
        assert result.acceptance.per_step_accepted[-4] == 2
        await made.until_idle()


class _TwoDrafters(ScriptedDraft):
    """`toy` never answers, `quick` is perfect."""

    async def GetInfo(self, request: Any, context: Any) -> Any:
        info = await super().GetInfo(request, context)
        info.drafters.add(method="quick", max_draft_tokens=7)
        return info


def _only_quick(
    draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]
) -> list[draft_pb2.DraftReply]:
    opened = next(o for o in draft.opens if o.key == item.key)
    return perfect(draft, item, ids) if opened.method == "quick" else []


async def test_a_late_drafter_does_not_stand_for_its_neighbours() -> None:
    """One worker hosts several drafters: each has its own breaker and its own pace."""
    draft = _TwoDrafters(_only_quick)
    options = {"proposal_wait_min_ms": 100, "breaker_open_ms": 60_000}
    async with world(draft, **options) as made:
        late = (await made.generate(method="toy", num_speculative_tokens=2)).acceptance
        assert late.fallbacks["late"] == 3 and late.fallbacks["breaker_open"] > 0
        result = await made.generate(method="quick", num_speculative_tokens=2)
        assert list(result.token_ids) == continuation(PROMPT, 40)
        assert "breaker_open" not in result.acceptance.fallbacks
        assert result.acceptance.accepted_tokens > 0


async def test_a_draft_that_comes_back_without_the_drafter_costs_speed_only() -> None:
    """It went while the client read slowly: its last proposal was still unread."""
    draft = ScriptedDraft()
    async with world(draft, num_speculative_tokens=2) as made:
        ids, reads = list[int](), asyncio.Event()

        async def deliver(delta: Any) -> None:
            ids.extend(delta.token_ids)
            if len(ids) >= 10:
                await reads.wait()

        group = made.host.fleet.group("")
        session = Session(group, 1, check(request(60), group, group.text, None), group.text)
        task = asyncio.create_task(session.run(deliver))
        worker = made.host.fleet.drafts[0]
        await until(lambda: len(ids) >= 10)
        mail = session._drafting._at.mail
        assert mail is not None
        await until(lambda: bool(mail._queue))
        await draft.stop()
        draft.drafter.method = "another"
        await draft.start(made.draft_address)
        await until(lambda: "another" in worker.standings)
        reads.set()
        finished = await asyncio.wait_for(task, 10)
        assert ids == continuation(PROMPT, 60)
        assert finished.acceptance.fallbacks["draft_lost"] == 1


async def test_rows_that_cannot_be_had_again_leave_the_session_plain() -> None:
    opened = {"count": 0}

    def script(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
        if len(draft.opens) > 1 and item.k:
            opened["count"] += 1
            return [proposal(item, len(ids), [], reason="rows_missing")]
        return perfect(draft, item, ids)

    draft = ScriptedDraft(script, **row_drafter())
    async with world(draft, SLOW, num_speculative_tokens=2) as made:
        task = await started(made)
        await draft.stop()
        await made.start_draft()
        result = await task
        assert list(result.token_ids) == continuation(PROMPT, LONG)
        assert result.acceptance.fallbacks["rows_missing"] == opened["count"] == 3


async def test_a_target_that_sends_no_rows_there_costs_speed_only() -> None:
    async with world(ScriptedDraft(**row_drafter())) as made:
        worker = made.host.fleet.drafts[0]
        assert worker.info is not None
        worker.info.push_address = "198.51.100.1:1"
        result = await made.generate()
        assert list(result.token_ids) == continuation(PROMPT, 40)
        assert result.acceptance.fallbacks == {"push_address_refused": 1}
        await made.until_idle()


@pytest.mark.parametrize("with_draft", [False, True])
async def test_a_target_that_restarts_in_time_goes_on(with_draft: bool) -> None:
    draft = ScriptedDraft(**row_drafter()) if with_draft else None
    if draft is not None:
        draft.seed = 3
    async with world(draft, SLOW, num_speculative_tokens=2) as made:
        task = await started(made, temperature=0.7, seed=3)
        await made.app.stop()
        await made.start_target()
        result = await task
        assert list(result.token_ids) == continuation(PROMPT, LONG, seed=3)
        assert result.acceptance.fallbacks["target_lost"] == 1
        assert result.usage.prompt_tokens == len(PROMPT)
        await made.until_idle()


async def test_a_target_that_stays_away_ends_the_request_with_the_count() -> None:
    async with world(engine=SLOW, target_return_ms=200) as made:
        task = await started(made)
        await made.app.stop()
        with pytest.raises(SpecwireError) as caught:
            await task
        assert caught.value.reason is Reason.ENGINE_DOWN
        assert int(caught.value.metadata["tokens"]) >= 10
        with pytest.raises(SpecwireError) as caught:
            await made.generate()
        assert caught.value.reason is Reason.NO_TARGET
        await made.start_target()


async def test_a_deadline_reaches_both_workers() -> None:
    """WC-28: what is left of the deadline travels with each item."""
    draft = ScriptedDraft()
    async with world(draft, {"step_s": 0.03}) as made:
        with pytest.raises(SpecwireError) as caught:
            await made.generate(max_tokens=LONG, timeout_s=0.3, num_speculative_tokens=1)
        assert caught.value.reason is Reason.DEADLINE
        assert 0 < draft.opens[0].deadline_ms <= 300
        await made.until_idle()
        assert [key.session_id for key in draft.closes] == [draft.opens[0].key.session_id]


@pytest.mark.parametrize("method", ["plain", "toy"])
async def test_a_client_that_leaves_frees_both_workers(method: str) -> None:
    """WC-4: a client that is gone costs no worker anything within a second."""
    draft = ScriptedDraft()
    async with world(draft, SLOW) as made, public_stub(made) as stub:
        wanted = request()
        wanted.speculation.method = method
        call = stub.Generate(wanted)
        for _ in range(3):
            await call.read()
        call.cancel()
        await made.until_idle(1.0)
        assert not made.host.servicer.sessions


async def test_four_clients_at_once_with_one_that_leaves() -> None:
    async with world(ScriptedDraft(), SLOW) as made, public_stub(made) as stub:
        call = stub.Generate(request())
        await call.read()
        tasks = [asyncio.create_task(made.generate(token_ids=[i, i + 1])) for i in range(4)]
        call.cancel()
        for i, task in enumerate(tasks):
            assert list((await task).token_ids) == continuation([i, i + 1], 40)
        await made.until_idle()


async def test_more_requests_than_allowed_are_refused_at_once() -> None:
    """WC-27: admission is ours, and says how long to wait."""
    async with world(engine=SLOW, max_sessions=1) as made:
        task = await started(made, 100)
        async with asyncio.timeout(0.5):
            with pytest.raises(SpecwireError) as caught:
                await made.generate()
        assert caught.value.reason is Reason.QUEUE_FULL
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.retry_after_ms > 0
        await task


async def test_a_draft_with_a_shorter_limit_is_left_out_beyond_it() -> None:
    """WC-25: drafting ends at the draft's own length, the text goes on."""
    draft = ScriptedDraft(max_length_tokens=30)
    async with world(draft, num_speculative_tokens=4) as made:
        result = await made.generate(max_tokens=60)
        assert list(result.token_ids) == continuation(PROMPT, 60)
        assert result.acceptance.fallbacks["draft_length"] > 10
        assert max(a.base_len + len(a.tokens) + a.k for a in draft.advances if a.k) <= 30
        await made.until_idle()
