"""A session away from its draft service: called back, or not; what the target hears of it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator import attachment, following
from coordinator.attachment import Attachment
from coordinator.breaker import Breaker
from coordinator.draft_worker import DraftWorker
from coordinator.drafters import Wanted
from coordinator.mailbox import Mailbox
from coordinator.offers import Choice
from coordinator.record import Record
from coordinator.round_costs import RoundCosts
from coordinator.settings import CoordinatorSettings
from coordinator.standing import Standing
from coordinator.target_worker import TargetWorker
from specwire.v1 import common_pb2, draft_pb2

NO_ROWS = 2**32 - 1


class FakeLink:
    """Keeps what is sent; a draft that is not `silent` opens sessions."""

    def __init__(self) -> None:
        self.ready, self.silent, self.incarnation, self.sessions = True, False, 7, 1
        self.load_sessions = 0
        self.sent: list[Any] = []
        self.mail: dict[int, Mailbox] = {}
        self.dropped: Counter[str] = Counter()

    def send(self, item: Any) -> bool:
        if not self.ready:
            return False
        self.sent.append(item)
        if isinstance(item, draft_pb2.DraftItem) and item.HasField("open") and not self.silent:
            opened = draft_pb2.DraftOpened(key=item.open.key, have_rows=0)
            self.mail[item.open.key.generation].put(opened)
        return True

    def open_mailbox(self, key: common_pb2.SessionKey) -> Mailbox:
        return self.mail.setdefault(key.generation, Mailbox())

    def close_mailbox(self, key: common_pb2.SessionKey) -> None:
        self.mail.pop(key.generation, None)

    def of(self, kind: str) -> list[Any]:
        return [getattr(item, kind) for item in self.sent if item.HasField(kind)]


class World:
    """One session with a prompt of 100 tokens, at a target whose load says what it likes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokens: int = 1000) -> None:
        monkeypatch.setattr(attachment, "_ATTACH_PAUSE_S", -1.0)
        self.late_s, self.wanted = 0.0, False
        clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + self.late_s)
        monkeypatch.setattr(following, "time", clock)
        settings = CoordinatorSettings(draft_open_ms=20)
        self.target = TargetWorker("unix:/none", settings, 1, cast(Any, None))
        self.draft = DraftWorker("unix:/none", settings, 1, [])
        self.target.link = self.to_target = cast(Any, FakeLink())
        self.draft.link = self.to_draft = cast(Any, FakeLink())
        for name in ("allows", "follows", "recalls"):
            monkeypatch.setattr(self.target.yields("toy", "separate"), name, self._wants)
        drafter = draft_pb2.DrafterInfo(method="toy", max_draft_tokens=7, needs_rows=True)
        self.breaker = Breaker(3, 60.0)
        choice = Choice(self.draft, drafter, Standing(self.breaker, RoundCosts()))
        group = SimpleNamespace(
            settings=settings,
            offers=SimpleNamespace(drafter=lambda *_, **__: choice),
            fleet=SimpleNamespace(rows=SimpleNamespace(note=lambda *_: None)),
        )
        self.record = Record("toy")
        self.at = Attachment(
            cast(Any, group),
            self.target,
            Wanted("toy"),
            common_pb2.Sampling(),
            k=7,
            deadline=None,
            record=self.record,
            adaptive=True,
            ends_at=100 + tokens,
        )

    def _wants(self, *_: Any) -> bool:
        return self.wanted

    async def open(self) -> None:
        key = common_pb2.SessionKey(coordinator=1, session_id=2, generation=self.at.generation + 1)
        await self.at.open(key, [1] * 100, self.target)
        self.at.push_to()

    def again(self, length: int = 110) -> bool:
        return self.at.reattach(5, [1] * length)

    def opened(self) -> list[int]:
        return [item.key.generation for item in self.to_draft.of("open")]


async def test_one_that_is_not_worth_it_stays_away_and_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Were it given up, those that are left to judge drafting by would become few."""
    made = World(monkeypatch, tokens=1000)
    await made.open()
    made.wanted, made.late_s = True, 2.0
    for length in (1000, 1090):
        assert not made.again(length)
        assert made.at.away is not None and made.at.choice is None and not made.at.given_up
    assert not made.record.fallbacks and not made.opened()


async def test_the_target_is_opened_again_once_the_drafter_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = World(monkeypatch)
    await made.open()
    made.wanted, made.late_s, made.to_draft.silent = True, 2.0, True
    assert not made.again() and made.opened() == [2]
    assert not made.again(120) and made.at.away is not None
    made.to_draft.mail[2].put(draft_pb2.DraftOpened(key=made.at.key, have_rows=50))
    assert made.again(130) and made.at.ahead
    key = made.at.begin_ahead()
    assert (key.generation, made.at.have_rows, made.at.told) == (2, 50, 110)
    assert made.at.away is None and made.at.push_to() is not None
    # The target is lost: another generation.
    made.to_draft.silent = False
    await made.open()
    assert made.opened() == [2, 3] and made.at.attached


async def test_a_drafter_that_does_not_open_is_waited_for_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = World(monkeypatch)
    await made.open()
    made.wanted, made.late_s, made.to_draft.silent = True, 2.0, True
    assert not made.again()
    await asyncio.sleep(0.03)
    assert not made.again() and not made.at.attached and made.at.away is not None
    assert made.at.key.generation == 1
    assert [key.key.generation for key in made.to_draft.of("close")] == [2]
    # And it is not called back at once.
    assert not made.again() and made.opened() == [2]
    made.late_s, made.to_draft.silent = 7.0, False
    assert not made.again() and made.opened() == [2, 3]
    # What is not wanted any more when the drafter is there changes nothing.
    made.wanted = False
    assert not made.again() and made.at.away is not None and made.at.key.generation == 1


async def test_each_time_it_stays_away_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = World(monkeypatch, tokens=10_000)
    made.wanted = True
    await made.open()
    for pause_s in (1, 4, 16, 60, 60):
        made.at.leave()
        count, left_s = len(made.opened()), made.late_s
        made.late_s = left_s + pause_s - 0.5
        assert not made.again() and len(made.opened()) == count
        made.late_s = left_s + pause_s
        assert not made.again() and made.again() and len(made.opened()) == count + 1
        made.at.begin_ahead()
        made.at.push_to()
    exports = made.to_target.of("export_rows")
    assert [getattr(item, "from") for item in exports] == [NO_ROWS] * 5
    assert [item.key.generation for item in exports] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("cause", ["down", "breaker"])
async def test_called_back_while_the_draft_is_away_itself(
    cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not wanted any more once it is back: the target hears of nothing."""
    made = World(monkeypatch)
    await made.open()
    made.wanted, made.late_s = True, 2.0
    if cause == "down":
        made.to_draft.ready = False
    else:
        for _ in range(3):
            made.breaker.failure(time.perf_counter())
    assert not made.again() and made.at.away is not None and made.at.choice is None
    made.wanted, made.to_draft.ready = False, True
    made.breaker.success()
    assert not made.again() and made.at.away is not None
    assert not made.opened() and not made.to_target.sent


async def test_lost_where_drafting_is_off_it_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    made = World(monkeypatch)
    made.wanted = True
    await made.open()
    made.at.lose("draft_lost")
    made.wanted = False
    assert not made.again() and made.at.away is not None and made.opened() == [1]
    assert [getattr(item, "from") for item in made.to_target.of("export_rows")] == [NO_ROWS]
