"""A target that runs ahead with a draft service, asking it on the stream of its rows: verdicts wait
for the proposal that continues them, and for nothing else."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.api import Item, ItemResult, nothing
from specwire.v1 import common_pb2, draft_pb2, target_pb2
from target_svc.asks import Answer, Question
from target_svc.decode import key_to_wire
from target_svc.metrics import Metrics
from target_svc.push_stream import PushStream
from target_svc.sessions import Key
from target_svc.settings import TargetSettings
from tests.service.asks_harness import (
    LONG_US,
    PROMPT,
    TEXT,
    Reply,
    asking,
    right,
    run,
    text_from,
)
from tests.service.fleet_harness import until
from tests.service.target_harness import (
    answer,
    key,
    no_answer,
    open_target,
    push_to,
    target,
    verify,
)
from tests.service.toy_engine import EOS, VOCAB, ToyEngine, continuation


@pytest.fixture(params=["thread", "loop"], autouse=True)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where steps behind an answer may run, as on a CPU and as on a GPU."""
    monkeypatch.setattr(ToyEngine, "admit_thread", lambda _: request.param == "loop")
    return str(request.param)


# -- a round ---------------------------------------------------------------------------------------


async def test_a_verdict_waits_for_the_proposal_that_the_next_step_verifies() -> None:
    async with asking() as made:
        first = await made.held()
        assert (first.step_id, first.base_len, list(first.tokens)) == (1, 4, TEXT[1:4])
        assert (first.k, first.rows_start, first.rows_count) == (2, 3, 3)
        assert first.key == key() and first.deadline_ms == LONG_US // 1000
        assert made.draft.asked_by == {made.service.app.incarnation}
        assert made.draft.rows_before == [3 + 3]  # those that it is about, too
        assert await made.peer.heartbeat(key()) == []  # nothing was said before
        steps = made.service.engine.log
        assert len(steps) == 2
        spent = common_pb2.Timings(compute_ns=10**15)
        made.draft.say(answer(first, TEXT[4:6], source="toy", confidences=[0.5], timings=spent))
        (verdict,) = await made.verdicts(1)
        proposal = verdict.proposal
        assert (proposal.step_id, proposal.base_len) == (1, 7) and proposal.key == key()
        assert (list(proposal.ids), proposal.source) == (TEXT[4:6], "toy")
        assert list(proposal.confidences) == [0.5]
        # It is not believed to have worked for longer than it was waited for.
        assert 0 < proposal.timings.compute_ns < 60e9 and not proposal.timings.queue_ns
        second = await made.draft.asked(2)
        assert (second.step_id, second.base_len, list(second.tokens)) == (2, 7, TEXT[4:7])
        assert [(s, ids) for s, ids, _ in steps[-1]] == [(6, tuple(TEXT[3:6]))]
        made.draft.say(answer(second, [TEXT[7], 0]))
        assert (await made.verdicts(1))[0].accepted == 2
        third = await made.draft.asked(3)
        assert (third.base_len, list(third.tokens)) == (10, TEXT[7:9])  # one was right
        made.draft.say(answer(third, []))
        (verdict,) = await made.verdicts(1)
        assert verdict.accepted == 1 and verdict.HasField("proposal") and not verdict.proposal.ids
        last = await made.draft.asked(4)
        assert (last.step_id, list(last.tokens)) == (4, TEXT[9:10])
        made.draft.say(answer(last, [1, 2]))
        assert list((await made.verdicts(1))[0].proposal.ids) == [1, 2]
        assert await made.peer.heartbeat(key()) == []
        assert len(steps) == 5 and made.tokens() == TEXT[1:10]


async def test_who_waits_for_a_draft_keeps_its_pages() -> None:
    """Nobody can ask anything of it, and what its coordinator asks next comes after the verdict: to
    one that comes behind it gives nothing until it has been idle from then on."""
    engine = ToyEngine(pages=4, page_tokens=4)
    settings = {"preempt_idle_ms": 400}
    async with asking(engine=engine, max_new=8, settings=settings, no_prefix_cache=True) as made:
        first = await made.held(run(1, 4, rounds=0))
        await asyncio.sleep(0.45)  # idle for so long, but for the verdict that is held back
        behind = made.service.peer()
        await behind.send(open_target([9] * 9, 3, key(2), no_prefix_cache=True))
        assert await made.peer.heartbeat(key()) == []
        assert made.service.count("preemptions") == 0
        made.draft.say(*right(first))
        await made.verdicts(1)
        assert made.service.count("preemptions") == 0
        assert (await behind.verdict()).step_id == 0
        assert made.service.count("preemptions") == 1


async def test_a_run_of_right_proposals_is_asked_for_once() -> None:
    async with asking(right) as made:
        await made.peer.send(run(1, 4, rounds=8))
        verdicts = await made.verdicts(9)
        assert [v.accepted for v in verdicts] == [2] * 9
        assert made.tokens() == TEXT[1:28]
        # Another one goes on from what the last verdict brought.
        await made.peer.send(run(10, 31, rounds=1))
        await made.verdicts(2)
        assert made.tokens() == TEXT[1:34]
        assert [a.base_len for a in made.draft.asks] == list(range(4, 37, 3))
        assert made.service.count("dropped", cause="draft_late") == 0


@pytest.mark.parametrize(("max_new", "ks"), [(5, [0]), (6, [1]), (7, [2, 0]), (8, [2, 0])])
async def test_no_more_is_asked_for_than_may_still_come(max_new: int, ks: list[int]) -> None:
    """Behind three of them: nobody waits where the last step has room for its own token alone."""
    async with asking(right, max_new=max_new) as made:
        await made.peer.send(run(1, 4))
        while not made.heard or not made.heard[-1].finish:
            await made.verdicts(1)
        assert made.tokens() == TEXT[1:max_new]
        wanted = ks[: len(made.heard) - 1]
        # Nobody waits for what the draft is only told.
        await until(lambda: len(made.draft.asks) >= len(wanted))
        assert [a.k for a in made.draft.asks] == wanted
        limited = [v.proposal.reason for v in made.heard if not v.proposal.ids][:-1]
        assert limited == ["k_limit"] * len(limited)


async def test_a_session_that_has_finished_asks_nobody() -> None:
    engine = ToyEngine()
    engine.forced[5] = EOS
    async with asking(right, engine) as made:
        await made.peer.send(verify(1, 4, [TEXT[1], EOS], **_fields(run(1, 4))))
        (verdict,) = await made.verdicts(1)
        assert verdict.finish and list(verdict.tokens) == [TEXT[1], EOS]
        assert await made.peer.heartbeat(key()) == []
        assert not made.draft.asks and not verdict.HasField("proposal")


def _fields(of: target_pb2.Verify) -> dict[str, Any]:
    names = ("free_run", "then_propose", "drafts_ahead", "draft_wait_us")
    return {name: getattr(of, name) for name in names}


# -- drafts that do not answer as they should ------------------------------------------------------


async def test_a_late_proposal_is_waited_for_no_longer_and_harms_nothing() -> None:
    async with asking() as made:
        first = await made.held(run(1, 4, rounds=1, draft_wait_us=20_000))
        (verdict,) = await made.verdicts(1)
        # The time belongs to the draft: the coordinator takes it for no step's.
        assert verdict.proposal.reason == "late" and not verdict.proposal.ids
        assert verdict.proposal.timings.queue_ns >= 19e6
        second = await made.draft.asked(2)
        made.draft.say(*right(first), *right(second))
        (verdict,) = await made.verdicts(1)
        assert (verdict.accepted, verdict.step_id) == (0, 2)  # it ran plain
        assert list(verdict.proposal.ids) == text_from(8, 2)
        assert made.service.count("dropped", cause="draft_late") == 1
        made.draft.say(*right(second))
        assert await made.peer.heartbeat(key()) == [] and made.tokens() == TEXT[1:5]


class _SlowToTell(ToyEngine):
    """Says late that its device is at work: what many sessions wait for is said later still."""

    def step(
        self, items: Sequence[Item], launched: Callable[[], None] = nothing
    ) -> list[ItemResult]:
        time.sleep(0.005)
        return super().step(items, launched)


async def test_a_wait_that_is_over_before_the_rows_are_sent() -> None:
    """Each verdict is said once, the rows go all the same, and so do the questions."""
    async with asking(engine=_SlowToTell()) as made:
        rows, keys = push_to(made.address), [key(i) for i in range(2, 13)]
        await made.peer.send(*(open_target(PROMPT, at=at, push_to=rows) for at in keys))
        await made.verdicts(11)
        made.heard.clear()
        # Another one's step follows at once, so that what is to be said of the ten waits for it.
        runs = [run(1, 4, rounds=2, at=at, draft_wait_us=1) for at in keys[1:]]
        await made.peer.send(*runs, verify(1, 4, free_run=6, at=keys[0]))
        heard = await made.verdicts(7 + 10 * 3)
        for at in keys[1:]:
            own = [v for v in heard if v.key == at]
            assert [v.step_id for v in own] == [1, 2, 3]
            assert [t for v in own for t in v.tokens] == TEXT[1:6]
        await made.draft.asked(10 * 3)
        await made.draft.rows(12 * 3 + 7 + 10 * 5)
        assert await made.peer.heartbeat(key()) == []


async def test_a_refusal_is_not_waited_out() -> None:
    async with asking(lambda ask: [no_answer(ask)]) as made:
        await made.peer.send(run(1, 4))
        verdicts = await made.verdicts(4)
        assert {v.proposal.reason for v in verdicts} == {"need_tokens"}
        assert not any(v.proposal.timings.compute_ns for v in verdicts)
        assert [v.accepted for v in verdicts] == [2, 0, 0, 0] and made.tokens() == TEXT[1:7]


@pytest.mark.parametrize(("have", "told"), [(2, 7), (4, 4), (0, 7), (7, 7), (2**32 - 1, 7)])
async def test_a_draft_that_misses_tokens_is_told_from_there(have: int, told: int) -> None:
    """Where the length that it says it has is one that it may have, in this run, with the rows: it
    has dropped those of a step that it was not asked about."""

    def script(ask: draft_pb2.Advance) -> list[Reply]:
        if ask.step_id > 1:
            return right(ask)
        refused = no_answer(ask)
        refused.refused.have_len = have
        return [refused]

    async with asking(script) as made:
        await made.peer.send(run(1, 4, rounds=2))
        assert [v.accepted for v in await made.verdicts(3)] == [2, 0, 2]
        second = made.draft.asks[1]
        assert (second.base_len, len(second.tokens)) == (told, 8 - told)
        assert list(second.tokens) == [*PROMPT, *TEXT][told:8]
        assert (second.rows_start, second.rows_count) == (told - 1, 8 - told)
        rows = [chunk for chunk in await made.draft.rows(7 + 8 - told) if chunk.step_id == 2]
        assert rows[0].start == told - 1 and sum(chunk.count for chunk in rows) == 8 - told


async def test_a_stream_that_breaks_is_not_waited_out() -> None:
    """Whoever waits is told, and who asks while it is down. It comes back by itself."""
    async with asking() as made:
        await made.held(run(1, 4, rounds=2))
        made.draft.end_stream()
        verdicts = await made.verdicts(3)
        assert {v.proposal.reason for v in verdicts} == {"draft_lost"}
        assert made.tokens() == TEXT[1:6]
        await made.up()
        made.draft.script = right
        await made.peer.send(run(4, 9, rounds=1))
        assert [v.accepted for v in await made.verdicts(2)] == [2, 2]
        assert made.draft.streams == 2 and made.draft.asks[-1].base_len == 12


BAD: dict[str, Callable[[draft_pb2.Advance], list[Reply]]] = {
    "id": lambda ask: [answer(ask, [VOCAB, *text_from(7, 1)])],
    "late id": lambda ask: [answer(ask, [*text_from(7, 1), 2**32 - 1])],
    "too many": lambda ask: [answer(ask, text_from(7, 20))],
    "far too many": lambda ask: [answer(ask, [1] * 500_000, confidences=[1.0] * 500_000)],
    "names": lambda ask: [answer(ask, text_from(7, 2), reason="r" * 10**6, source="s" * 10**6)],
    "length": lambda ask: [answer(ask, text_from(7, 2), base_len=8)],
    "session": lambda ask: [answer(ask, [1], key=key(7)), *right(ask)],
    "generation": lambda ask: [answer(ask, [1], key=key(1, 7)), *right(ask)],
    "coordinator": lambda ask: [answer(ask, [1], key=key(1, 1, 7)), *right(ask)],
    "step": lambda ask: [answer(ask, [1], step_id=ask.step_id + 1), *right(ask)],
    "twice": lambda ask: [*right(ask), answer(ask, [1]), *right(ask), no_answer(ask)],
    "closed": lambda ask: [Reply(closed=draft_pb2.DraftClosed(key=ask.key)), Reply(), *right(ask)],
}


@pytest.mark.parametrize(
    ("trick", "accepted", "cause"),
    [
        ("id", 0, "draft_id_range"),
        ("late id", 1, "draft_id_range"),
        ("too many", 2, "draft_too_long"),
        ("far too many", 0, "draft_too_long"),
        ("names", 2, ""),
        ("length", 0, "draft_length"),
        *((trick, 2, "") for trick in ("session", "generation", "coordinator", "step", "twice")),
        ("closed", 2, ""),
    ],
)
async def test_answers_that_cannot_be_are_hints_all_the_same(
    trick: str, accepted: int, cause: str
) -> None:
    """What goes on to the coordinator stays small, whatever a draft makes up."""
    async with asking(BAD[trick]) as made:
        await made.peer.send(run(1, 4, rounds=1))
        first, second = await made.verdicts(2)
        assert second.accepted == accepted and first.ByteSize() < 1000
        assert made.tokens() == TEXT[1 : 5 + accepted]
        if cause:
            assert made.service.count("dropped", cause=cause) > 0
        assert await made.peer.heartbeat(key()) == []


async def test_a_stream_that_stands_still_keeps_one_question_of_a_session() -> None:
    """Nothing piles up behind a draft that does not read; what it misses it is told later."""
    stream = PushStream("unix:/nowhere", TargetSettings(), 1, Metrics())
    stream._up, heard = True, list[Answer]()
    names = [Key(1, i, 1) for i in range(3)]
    for step in range(5):
        for name in names:
            stream.ask(name, key_to_wire(name), Question(step, 1, [5], 1, 1000), heard.append)
    assert [question.step_id for _, question in stream._asks.values()] == [4, 4, 4]
    stream.attach()
    stream.detach(names[0])
    assert list(stream._asks) == names[1:] and not heard
    await stream.close()


# -- what may not be asked for ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"drafts_ahead": False}, ("then_propose", "2")),
        ({"draft_wait_us": 0}, ("draft_wait_us", "0")),
        ({"then_propose": 0}, ("drafts_ahead", "True")),
    ],
)
async def test_fields_that_do_not_go_together(
    changes: dict[str, Any], named: tuple[str, str]
) -> None:
    """The field, its value and what is accepted are named; the session goes on."""
    async with asking(right) as made:
        await made.peer.send(run(1, 4, **changes))
        error = (await made.peer.refused()).error
        assert error.reason == "FIELD_INVALID" and error.metadata["accepted"]
        assert (error.metadata["field"], error.metadata["value"]) == named
        await made.peer.send(run(1, 4, rounds=0))
        assert (await made.verdicts(1))[0].accepted == 2


async def test_without_anybody_who_proposes() -> None:
    async with target() as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT))
        await peer.verdict()
        await peer.send(run(1, 4))
        error = (await peer.refused()).error
        assert error.reason == "UNSUPPORTED"
        assert "then_propose" in error.message and "push_to" in error.message


# -- what happens while a verdict is held ----------------------------------------------------------


async def test_a_newer_step_ends_the_run_and_the_wait() -> None:
    async with asking() as made:
        first = await made.held()
        await made.peer.send(verify(5, 5, text_from(5, 1)))
        one, two = await made.verdicts(2)
        assert (one.step_id, one.new_len, one.HasField("proposal")) == (1, 7, False)
        assert (two.step_id, two.base_len, two.new_len) == (5, 5, 7)
        made.draft.say(*right(first))
        assert await made.peer.heartbeat(key()) == []
        await made.peer.send(verify(6, 99))
        assert (await made.peer.refused()).have_len == 7


async def test_a_repeat_on_a_new_link_is_answered_once_the_verdict_is_said() -> None:
    async with asking() as made:
        first = await made.held(run(1, 4, rounds=0))
        made.peer.call.cancel()
        other = made.service.peer()
        await other.send(run(1, 4, rounds=0))
        assert await other.heartbeat(key()) == []
        made.draft.say(*right(first))
        verdict = await other.verdict()
        assert verdict.step_id == 1 and list(verdict.proposal.ids) == text_from(7, 2)
        await other.send(run(1, 4, rounds=0))
        assert await other.verdict() == verdict
        assert len(made.service.engine.log) == 2


async def test_a_verdict_that_nobody_hears_is_kept() -> None:
    """The link breaks, the answer comes, and only then somebody asks again."""
    async with asking() as made:
        first = await made.held(run(1, 4, rounds=0))
        made.peer.call.cancel()
        await until(lambda: next(iter(made.service.app.scheduler.sessions)).link.closed)  # type: ignore[union-attr]
        made.draft.say(*right(first))
        await until(lambda: made.service.count("dropped", cause="reply_without_link") == 1)
        other = made.service.peer()
        await other.send(run(1, 4, rounds=0))
        assert list((await other.verdict()).proposal.ids) == text_from(7, 2)


async def test_a_close_and_a_lease_that_ends_drop_what_is_held() -> None:
    for closes in (True, False):
        async with asking(lease_ms=200) as made:
            first = await made.held()
            if closes:
                await made.peer.send(target_pb2.CloseSession(key=key()))
                assert (await made.peer.reply()).HasField("closed")
            await made.service.until_idle()
            made.draft.say(*right(first))
            assert await made.peer.heartbeat(key()) == [1]
            assert made.service.count("dropped", cause="lease_expired") == (not closes)


async def test_a_deadline_ends_the_wait() -> None:
    """What was drawn in time is said; the step after it is refused."""
    async with asking() as made:
        await made.held(run(1, 4, deadline_ms=60))
        (verdict,) = await made.verdicts(1)
        assert verdict.new_len == 7 and verdict.proposal.reason == "late"
        refused = await made.peer.refused()
        assert (refused.error.reason, refused.step_id) == ("DEADLINE", 2)
        assert refused.have_len == 7


async def test_a_deadline_that_ends_a_wait_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where deadlines were looked at last while the session had no step."""
    monkeypatch.setattr("target_svc.scheduler._EXPIRE_S", 10.0)
    async with asking() as made:
        await made.held(run(1, 4, deadline_ms=400))
        other = made.service.peer()
        await other.send(open_target(PROMPT, 9, key(2), deadline_ms=20))
        opened = await other.verdict()
        await asyncio.sleep(0.05)
        await other.send(verify(1, opened.new_len, at=key(2)))
        await other.verdict()
        (verdict,) = await made.verdicts(1)
        assert verdict.new_len == 7 and verdict.proposal.reason == "late"
        refused = await made.peer.refused()
        assert (refused.error.reason, refused.step_id) == ("DEADLINE", 2)


async def test_pages_that_are_taken_meanwhile_are_filled_again() -> None:
    """The session keeps its ids: what the next step needs runs again, with the proposal."""
    engine = ToyEngine(pages=3, page_tokens=4)
    async with asking(engine=engine, max_new=9, priority=1) as made:
        first = await made.held(run(1, 4, rounds=1))
        other = open_target([1, 2, 3], 9, at=key(2))
        await made.peer.send(other)
        assert (await made.peer.verdict()).key == key(2)
        await made.peer.send(verify(1, 4, continuation([1, 2, 3], 6)[1:6], at=key(2)))
        assert (await made.peer.verdict()).new_len == 10
        assert made.service.count("preemptions") == 1
        made.draft.say(*right(first))
        await made.peer.send(target_pb2.CloseSession(key=key(2)))
        replies = [await made.peer.reply() for _ in range(2)]
        (verdict,) = [r.verdict for r in replies if r.HasField("verdict")]
        assert verdict.step_id == 1
        made.draft.script = right
        made.draft.say(*right(await made.draft.asked(2)))
        assert (await made.verdicts(1))[0].accepted == 2
        assert made.tokens() == TEXT[4:7]


async def test_a_drain_waits_for_a_run_that_waits() -> None:
    async with asking(max_new=9, settings={"drain_ms": 3000}) as made:
        first = await made.held()
        stopping = asyncio.create_task(made.service.app.stop())
        made.draft.script = right
        made.draft.say(*right(first))
        while not made.heard or not made.heard[-1].finish:
            await made.verdicts(1)
        assert made.tokens() == TEXT[1:9]
        await made.peer.send(target_pb2.CloseSession(key=key()))
        await asyncio.wait_for(stopping, 3)


async def test_an_end_without_a_drain_waits_for_nobody() -> None:
    async with asking() as made:
        await made.held()
        await asyncio.wait_for(made.service.app.stop(), 2)


class Capturing(ToyEngine):
    """Launches the next step that opens a session only once `heard` is set."""

    slow, in_time = False, True

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.heard = threading.Event()

    def step(
        self, items: Sequence[Item], launched: Callable[[], None] = nothing
    ) -> list[ItemResult]:
        if self.slow and any(item.start == 0 for item in items):
            self.slow = False
            self.in_time = self.heard.wait(5)  # a graph is captured
        return super().step(items, launched)


async def test_a_draft_is_not_late_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time runs from the question on, which does not wait for another session's launch."""
    monkeypatch.setattr("target_svc.scheduler._EXPIRE_S", 10.0)  # says what is owed, too
    engine = Capturing(pages=256)
    async with asking(right, engine=engine) as world:
        other = world.service.peer()
        engine.gate.clear()
        engine.entered.clear()
        await world.peer.send(run(1, 4, rounds=1, draft_wait_us=2_000_000))
        await asyncio.to_thread(engine.entered.wait, 5)
        engine.slow = True
        await other.send(open_target([9] * 30, 3, key(2)))
        await asyncio.sleep(0.1)
        engine.gate.set()
        (verdict,) = await world.verdicts(1)
        engine.heard.set()
        await other.verdict()
    assert not verdict.proposal.reason and list(verdict.proposal.ids)
    assert engine.in_time, "the question or the verdict waited for the other session's launch"


async def test_a_verdict_does_not_wait_for_a_slow_launch() -> None:
    heard, in_time = threading.Event(), []

    class Slow(ToyEngine):
        def step(
            self, items: Sequence[Item], launched: Callable[[], None] = nothing
        ) -> list[ItemResult]:
            if self.log:
                in_time.append(heard.wait(5))
            return super().step(items, launched)

    async with target(Slow(pages=256)) as service:
        peer = service.peer()
        await peer.send(open_target(PROMPT, at=key(1), free_run=1))
        await peer.verdict()
        heard.set()
        await peer.verdict()
    assert in_time == [True]
