"""Drafts in services of their own follow sessions at a cost. Simulated worlds: it vanishes where
drafting is off, and drafting stays where it pays."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from coordinator.following import Pause
from coordinator.trials import Load
from coordinator.yields import Yields

FREE_RUN, ANSWER, RATE, K = 32, 128, 0.5, 3
TOKENS = 1 + RATE + RATE**2 + RATE**3


@dataclass
class Member:
    """A session: its tokens to come, its plain steps that come unasked, what it was told."""

    left: int
    follows: bool
    k: int = 0
    ahead: int = 0
    drafts: bool = False
    pause: Pause = field(default_factory=Pause)


@dataclass
class World:
    """Rounds in step, whose sessions begin anew when they end. If all are followed all yield `1 -
    cost` of what they could; if all draft besides, `gain(sessions)` times what they could."""

    gain: Callable[[int], float]
    cost: float
    answer: int = ANSWER
    prompt: int = 0
    # Sessions draft where they may; else their policies find that it does not pay.
    eager: bool = True
    yields: Yields = field(default_factory=lambda: Yields(leaves=True))
    now: float = 0.0
    plain_s: float = 0.006
    members: list[Member] = field(default_factory=list)
    opened: int = 0
    called_back: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(3))
    # Whether most drafted, and most were followed, by round.
    drafted: list[bool] = field(default_factory=list)
    followed: list[bool] = field(default_factory=list)

    def load(self, sessions: int, at_once: bool = False) -> None:
        """So many sessions, of which new ones are somewhere in their text, unless all begin."""
        del self.members[sessions:]
        while len(self.members) < sessions:
            self.members.append(self.new(len(self.members) + 1))
            if not at_once:
                self.members[-1].left = self.rng.randint(1, self.answer)

    def new(self, sessions: int) -> Member:
        self.opened += 1
        return Member(self.answer, self.yields.follows(sessions))

    def decide(self, member: Member) -> None:
        if member.ahead:
            member.ahead -= 1
            return
        sessions = len(self.members)
        if member.follows:
            member.drafts = self.yields.allows(sessions)
            member.follows = member.drafts or self.yields.follows(sessions)
            if not member.follows:
                member.pause.left(self.now)
        elif self.recalls(member):
            member.pause.called_back()
            member.follows = member.drafts = True
            self.called_back += 1
        member.drafts = member.drafts and member.follows
        member.k = K if member.drafts and self.eager else 0
        member.ahead = 0 if member.k else FREE_RUN

    def recalls(self, member: Member) -> bool:
        wanted = self.yields.recalls(len(self.members), self.now)
        return wanted and self.worth(member.left) and self.now >= member.pause.until

    def worth(self, left: int) -> bool:
        """As for a drafter that reads rows."""
        return left >= 32 and 8 * left >= self.prompt + self.answer - left

    def round(self) -> int:
        for member in self.members:
            self.decide(member)
        sessions = len(self.members)
        drafting = sum(m.k > 0 for m in self.members) / sessions
        following = sum(m.follows for m in self.members) / sessions
        self.drafted.append(drafting > 0.5)
        self.followed.append(following > 0.5)
        followed, gain = 1 / (1 - self.cost), self.gain(sessions)
        took = 1 + following * (followed - 1) + drafting * (TOKENS / gain - followed)
        self.now += self.plain_s * took * self.rng.uniform(0.95, 1.05)
        tokens = 0
        for i, member in enumerate(self.members):
            got = 1
            while got <= member.k and self.rng.random() < RATE:
                got += 1
            told = member.drafts, member.follows
            self.yields.note(self.now + 1e-6 * i, got, sessions, *told)
            tokens += got
            member.left -= got
            if member.left <= 0:
                self.members[i] = self.new(sessions)
        return tokens

    def run(self, seconds: float) -> float:
        """Tokens a second, over what all plain sessions without a draft service have."""
        start, tokens = self.now, 0
        while self.now < start + seconds:
            tokens += self.round()
        return tokens * self.plain_s / (self.now - start) / len(self.members)

    def share(self, seen: list[bool]) -> float:
        return sum(seen) / len(seen)


def losing(gain: float, cost: float = 1 / 3, **options: object) -> World:
    return World(lambda _: gain, cost, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(
    ("sessions", "gain"), [(8, 0.45), (8, 0.66), (8, 0.92), (128, 0.5), (128, 0.9)]
)
def test_where_drafting_loses_nobody_is_followed(sessions: int, gain: float, eager: bool) -> None:
    """Whether it is worse than following alone, or better than that and yet worse than plain; or
    policies that do not draft leave following alone."""
    made = losing(gain, eager=eager)
    made.load(sessions)
    made.run(3)
    assert made.run(15) > 0.95
    if sessions < 100:
        made.followed.clear()
        assert made.run(60) > 0.97
        assert made.share(made.followed) < 0.1


@pytest.mark.parametrize("sessions", [2, 8, 32])
@pytest.mark.parametrize("cost", [0.02, 1 / 3])
def test_where_drafting_wins_it_goes_on(sessions: int, cost: float) -> None:
    made = losing(1.3, cost)
    made.load(sessions)
    made.run(3)
    made.drafted.clear()
    assert made.run(30) > 1.26
    assert made.share(made.drafted) > 0.94


def test_when_the_load_falls_sessions_draft_again() -> None:
    """At a load that was never met, too, and whatever was found at another."""
    made = World(lambda sessions: 1.3 if sessions < 16 else 0.6, 1 / 3)
    made.load(128)
    made.run(5)
    for _ in range(2):
        made.load(8)
        made.run(4 * ANSWER * made.plain_s)
        made.drafted.clear()
        made.run(4)
        assert made.share(made.drafted) > 0.8
        made.load(128)
        made.run(3)
        assert made.run(4) > 0.93


@pytest.mark.parametrize("gain", [0.6, 1.3])
def test_nothing_flaps(gain: float) -> None:
    made = losing(gain)
    made.load(32)
    made.run(5)
    made.drafted.clear()
    made.followed.clear()
    made.run(120)
    assert sum(a != b for a, b in pairwise(made.drafted)) <= 12
    assert sum(a != b for a, b in pairwise(made.followed)) <= 12


@pytest.mark.parametrize("gain", [0.6, 1.3])
def test_long_answers_are_left_and_followed_again(gain: float) -> None:
    """Nobody opens for minutes: those in the middle of their text are followed again."""
    made = World(lambda sessions: gain if sessions < 16 else 0.6, 1 / 3, answer=50_000)
    made.load(32, at_once=True)
    made.run(5)
    assert made.run(20) > 0.95
    opened = made.opened
    made.load(8)
    made.run(4)
    assert made.run(10) > (1.25 if gain > 1 else 0.93)
    assert made.opened == opened


@pytest.mark.parametrize("eager", [True, False])
def test_sessions_that_begin_and_end_together(eager: bool) -> None:
    made = losing(0.8, eager=eager)
    for _ in range(8):
        made.load(0)
        for number in range(32, 0, -1):
            made.yields.note(made.now, 1, number, None)
        made.load(32, at_once=True)
        made.run(0.7)
    made.load(32, at_once=True)
    assert made.run(20) > 0.93


def test_sessions_that_come_at_once_open_as_their_like_did() -> None:
    """On the way to the load that is known there are others, at which nothing was ever tried."""
    made = losing(0.6)
    for number in range(2, 65):
        for _ in range(3):
            made.now += 0.002
            made.yields.note(made.now, 1, number, True)
    made.load(64)
    made.run(2)
    assert not (made.yields.trying or made.followed[-1])
    made.yields.note(made.now + 0.01, 1, 1, None)
    made.load(0)
    made.load(64)
    assert sum(member.follows for member in made.members) <= 3


def test_few_are_always_followed() -> None:
    made = losing(0.6)
    made.load(3)
    made.run(20)
    assert all(made.followed) and not made.yields.allows(3)
    # But for one that left where there were more: it would do nothing but follow.
    assert made.yields.follows(3) and not made.yields.recalls(3, made.now + 100)


def test_a_drafter_that_costs_nothing_to_follow_is_left_alone() -> None:
    made = World(lambda _: 0.6, 0.0, yields=Yields())
    made.load(16)
    made.run(20)
    assert all(made.followed) and not made.yields.allows(64)


@pytest.mark.parametrize("low", [0.6, 1.3])
@pytest.mark.parametrize(("few", "many"), [(3, 5), (6, 20)])
def test_a_load_that_swings_calls_nobody_back_for_long(few: int, many: int, low: float) -> None:
    """Whether drafting wins where they are few or not: contexts are computed again each time."""
    made = World(lambda sessions: low if sessions <= few else 0.6, 0.2, answer=10**6)
    made.load(many, at_once=True)
    made.run(20)
    made.called_back = 0
    for _ in range(10):
        made.load(few)
        made.run(3)
        made.load(many, at_once=True)
        made.run(3)
    assert made.called_back <= 2 * many


@pytest.mark.parametrize(("sessions", "after_s"), [(20, 5.0), (30, 0.1)])
def test_a_trial_that_is_cut_off_is_rare_from_then_on(sessions: int, after_s: float) -> None:
    """Its sessions come back too late, or others do."""
    load = Load(plain=True, leaves=True, sessions=20, trial=True, pause=8.0)
    load.leave(2.0)
    assert load.trial
    load.enter(sessions, 2.0 + after_s)
    assert not load.trial and load.pause * load.window_s >= 16 * 2.0


def test_contexts_that_are_too_long_to_come_back_bring_no_drafting_that_loses() -> None:
    made = World(lambda _: 0.6, 1 / 3, answer=800, prompt=8000)
    made.load(16)
    made.run(3)
    assert made.run(40) > 0.95 and made.called_back == 0
