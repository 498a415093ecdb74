"""Drafting judged by what all sessions yield, in simulated worlds where they share a resource.

Every session that drafts makes everybody's round longer, so to each of them a plain step looks as
slow as a round with draft tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from coordinator.acceptance import Acceptance
from coordinator.policy import KPolicy
from coordinator.round_costs import RoundCosts
from coordinator.yields import Yields

LIMIT, FREE_RUN = 3, 32
RATE = 0.4
PLAIN_S = 0.020


@dataclass
class Member:
    """A session: its policy, its steps, those of them that still come unasked, and what it was
    told when it decided on the one that is on. `fixed`: a request that names its K."""

    policy: KPolicy
    fixed: int | None = None
    step: int = 0
    ahead: int = 0
    k: int = 0
    told: bool | None = None
    asked: int = 0


@dataclass
class World:
    """Rounds in step. One takes what a plain one does, and `share` times that when all draft."""

    share: float
    plain_s: float = PLAIN_S
    yields: Yields = field(default_factory=Yields)
    governed: bool = True
    now: float = 0.0
    members: list[Member] = field(default_factory=list)
    by_state: Counter[str] = field(default_factory=Counter)
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    shared: tuple[RoundCosts, RoundCosts, Acceptance] = field(
        default_factory=lambda: (RoundCosts(), RoundCosts(), Acceptance())
    )

    def load(self, sessions: int, fixed: int | None = None) -> None:
        """So many sessions, new ones with a K of their own where it is given."""
        del self.members[sessions:]
        while len(self.members) < sessions:
            # They begin one after another, and so try other K at different times.
            later = 7 * len(self.members) % 20
            self.members.append(Member(KPolicy(*self.shared, start=2), fixed, ahead=later))

    def decide(self, member: Member) -> None:
        if member.ahead:
            member.ahead -= 1
            return
        sessions, member.told = len(self.members), None
        member.asked += 1
        if member.fixed is not None:
            member.k = member.fixed
            return
        if self.governed:
            member.told = self.yields.allows(sessions)
            if not member.told:
                member.k, member.ahead = 0, FREE_RUN
                return
        member.k = member.policy.choose(member.step, LIMIT, sessions, 100)
        if not member.k:
            member.ahead = min(FREE_RUN, member.policy.plain_steps(member.step))

    def round(self, slower: float = 1.0) -> int:
        """One round of all; its tokens."""
        for member in self.members:
            self.decide(member)
        drafting, sessions = sum(m.k > 0 for m in self.members), len(self.members)
        self.by_state["drafting" if 2 * drafting > sessions else "plain"] += 1
        seconds = self.plain_s * (1 + (self.share - 1) * drafting / sessions) * slower
        seconds *= self.rng.uniform(0.9, 1.1)
        self.now += seconds
        tokens = 0
        for i, member in enumerate(self.members):
            accepted = 0
            while accepted < member.k and self.rng.random() < RATE:
                accepted += 1
            # Whoever drafts or not, the round of all takes the same time.
            self.shared[0].note(member.k, sessions, 100, seconds)
            if member.k:
                self.shared[1].note(member.k, sessions, 100, 0.0005)
                member.policy.note(member.k, accepted)
            member.step += 1
            tokens += 1 + accepted
            self.yields.note(self.now + 1e-5 * i, 1 + accepted, sessions, member.told)
        return tokens

    def run(self, seconds: float) -> float:
        """Tokens per second of all over so long."""
        start, tokens = self.now, 0
        while self.now < start + seconds:
            tokens += self.round()
        return tokens / (self.now - start)


def alone(share: float, sessions: int, seconds: float) -> float:
    """What the policies yield where nobody looks at all of them."""
    made = World(share, governed=False)
    made.load(sessions)
    return made.run(seconds)


@pytest.mark.parametrize("sessions", [2, 8, 33])
def test_where_drafting_is_bad_together_it_comes_near_all_plain(sessions: int) -> None:
    seconds = 100.0 if sessions < 20 else 60.0
    plain = sessions / PLAIN_S
    # Each by itself finds that it pays, and all have less than they could.
    assert alone(2.5, sessions, 10) < (0.93 if sessions == 2 else 0.8) * plain
    made = World(2.5)
    made.load(sessions)
    assert made.run(seconds) > 0.95 * plain
    # At length trials cost next to nothing.
    assert made.run(seconds) > 0.98 * plain


@pytest.mark.parametrize("sessions", [2, 8, 33])
def test_where_drafting_is_good_together_it_goes_on(sessions: int) -> None:
    seconds = 100.0 if sessions < 20 else 60.0
    made = World(1.1)
    made.load(sessions)
    assert made.run(seconds) > 0.95 * alone(1.1, sessions, seconds)
    made.by_state.clear()
    made.run(seconds)
    assert made.by_state["plain"] < 0.08 * made.by_state.total()


@pytest.mark.parametrize("sessions", [4, 8, 33])
def test_fast_steps_are_judged_in_less_time(sessions: int) -> None:
    """On a GPU an answer may be over in half a second."""
    for seed in range(10):
        made = World(3.0, plain_s=0.0015, rng=random.Random(seed))
        made.load(sessions)
        made.run(0.5)
        assert not made.yields.allows(sessions)
        good = World(1.1, plain_s=0.0015, rng=random.Random(seed))
        good.load(sessions)
        good.run(0.8)
        assert good.yields.allows(sessions)


@pytest.mark.parametrize("sessions", [8, 33])
def test_sessions_that_all_come_and_go_together_are_judged_over_several_turns(
    sessions: int,
) -> None:
    """Each turn is shorter than windows and trial together, and all begin anew behind it."""
    for seed in range(6):
        made = World(3.0, plain_s=0.0015, rng=random.Random(seed))
        for _ in range(8):
            made.load(0)
            for _ in range(sessions):
                made.load(len(made.members) + 1)
                made.yields.note(made.now, 1, len(made.members), None)
            made.run(0.2)
            for number in range(sessions, 0, -1):
                made.yields.note(made.now, 1, number, None)
        made.load(sessions)
        made.run(0.02)
        assert not made.yields.allows(sessions)


@pytest.mark.parametrize(
    ("sessions", "plain_s", "turn_s"), [(2, 0.1, 0.8), (8, 0.02, 0.4), (32, 0.0015, 0.1)]
)
def test_trials_that_nobody_sees_the_end_of_cost_little(
    sessions: int, plain_s: float, turn_s: float
) -> None:
    """Sessions go before a trial of theirs is judged, again and again, where drafting is good."""
    made = World(1.0, plain_s=plain_s)
    forbidden = rounds = 0
    while made.now < 2000 * plain_s:
        made.load(sessions)
        until = made.now + turn_s
        while made.now < until:
            made.round()
            rounds += 1
            forbidden += not made.yields.allows(sessions)
        made.load(0)
        for number in range(sessions, 0, -1):
            made.yields.note(made.now, 1, number, None)
    assert forbidden < 0.06 * rounds


def test_trials_that_are_lost_are_a_minute_apart_in_the_end() -> None:
    """However soon a trial ends: a world that changes is noticed within that time."""
    made, begun = Batches(0.01), []
    while made.now < 400:
        before, drafts = made.yields.trying, made.yields.allows(32)
        made.rounds(1, [drafts] * 32, 4 if drafts else 1)
        if made.yields.trying and not before:
            begun.append(made.now)
    assert 55 < begun[-1] - begun[-2] < 70 and begun[0] < 1


@pytest.mark.parametrize("share", [1.2, 2.0])
def test_trials_that_end_early_decide_as_well(share: float) -> None:
    """Both ways stay what they were, in most of so many worlds' time."""
    right = total = 0
    for seed in range(8):
        made = World(share, plain_s=0.0015, rng=random.Random(seed))
        made.load(8)
        made.run(1.0)
        made.by_state.clear()
        made.run(3.0)
        right += made.by_state["drafting" if share < 1.5 else "plain"]
        total += made.by_state.total()
    assert right > 0.93 * total


def test_one_session_is_left_to_its_policy() -> None:
    made, free = World(2.5), World(2.5, governed=False)
    for each in (made, free):
        each.load(1)
    assert made.run(60) == free.run(60)
    assert made.yields.allows(1)


def test_a_request_that_names_its_k_is_never_governed() -> None:
    """Nor are its like a reason to forbid anything to the few others."""
    made = World(2.5)
    made.load(7, fixed=3)
    made.load(8)
    made.run(60)
    assert {m.k for m in made.members[:7]} == {3}
    assert not any(m.told is False for m in made.members)
    # Where those others are the many, they stop, and the K that was named stays.
    made.load(0)
    made.load(1, fixed=3)
    made.load(8)
    made.run(60)
    assert made.members[0].k == 3
    assert not made.yields.allows(8)


def test_a_change_of_load_is_followed() -> None:
    """Good together for few, bad for many, and back."""
    made = World(1.1)
    made.load(4)
    made.run(30)
    assert made.yields.allows(4)
    made.share = 2.5
    made.load(32)
    made.run(8)
    assert not made.yields.allows(32)
    made.share = 1.1
    made.load(4)
    assert made.run(20) > 0.95 * alone(1.1, 4, 20)
    # What was found at the first load is known at once when it comes again.
    made.share = 2.5
    made.load(32)
    made.run(1)
    assert not made.yields.allows(32)


def test_a_world_that_changes_is_noticed_within_the_longest_pause() -> None:
    made = World(2.5)
    made.load(8)
    made.run(100)
    assert not made.yields.allows(8)
    made.share = 1.1
    made.run(75)
    assert made.run(60) > 0.93 * alone(1.1, 8, 60)


@pytest.mark.parametrize("share", [1.1, 2.5])
def test_a_hiccup_flips_nothing_for_long(share: float) -> None:
    """Rounds twenty times as long, once in a while and whenever it hurts: in trials too."""
    made = World(share)
    made.load(8)
    tokens, start = 0, made.now
    lost = 0.0
    for i in range(6000):
        slow = 20.0 if i % 97 == 50 else 1.0
        before = made.now
        tokens += made.round(slow)
        if slow > 1:
            lost += made.now - before
    rate = tokens / (made.now - start - lost)
    assert rate > 0.93 * max(8 / PLAIN_S, alone(share, 8, 60))


def test_sessions_that_come_and_go_one_by_one_stop_no_learning() -> None:
    """A session ends and the next one comes a few rounds later, several times a second."""
    made = World(2.5)
    made.load(16)
    tokens, start = 0, made.now
    for i in range(4000):
        if i % 12 == 0:
            made.load(15)
        elif i % 12 == 2:
            made.load(16)
        tokens += made.round()
    assert tokens / (made.now - start) > 0.93 * 16 / PLAIN_S


class Batches:
    """Steps that bring each session a verdict in the same frame."""

    def __init__(self, step_s: float) -> None:
        self.yields, self.step_s, self.now = Yields(), step_s, 0.0

    def rounds(self, count: int, told: list[bool | None], tokens: int) -> None:
        for _ in range(count):
            self.now += self.step_s
            for each in told:
                self.now += 1e-6
                self.yields.note(self.now, tokens, len(told), each)

    def until_trial(self, told: list[bool | None], tokens: int, most: int = 1000) -> bool:
        for _ in range(most):
            if self.yields.trying:
                return True
            self.rounds(1, told, tokens)
        return False


def test_a_long_run_ahead_delays_a_trial_and_does_not_spoil_it() -> None:
    """Windows begin when the last session has come back from what it was told before."""
    made = Batches(0.05)
    assert made.until_trial([True] * 4, 2)
    assert not made.yields.allows(4)
    # One is still on the way: whatever the others yield, nothing is decided.
    made.rounds(60, [False, False, False, True], 4)
    assert made.yields.trying
    made.rounds(16, [False] * 4, 4)
    assert not made.yields.trying and not made.yields.allows(4)


@pytest.mark.parametrize("step_s", [0.03, 0.06, 0.09])
def test_the_edge_of_a_window_cuts_no_step_in_two(step_s: float) -> None:
    """A window of a few steps would be wrong by one of them, far more than the margin."""
    made = Batches(step_s)
    assert made.until_trial([True] * 32, 10)
    made.rounds(30, [False] * 32, 11)
    assert not made.yields.allows(32)
    same = Batches(step_s)
    assert same.until_trial([True] * 32, 10)
    same.rounds(30, [False] * 32, 10)
    assert same.yields.allows(32)


def test_a_hiccup_just_before_a_trial_is_no_measure() -> None:
    made = Batches(0.05)
    made.rounds(18, [True] * 4, 4)
    made.rounds(10, [True] * 4, 1)
    assert made.until_trial([True] * 4, 4)
    made.rounds(20, [False] * 4, 3)
    assert made.yields.allows(4) and not made.yields.trying


def test_nothing_is_tried_for_the_sake_of_few() -> None:
    """Where most sessions are never asked, the others draft as their policies like, even if they
    were forbidden to before."""
    made = Batches(0.05)
    assert not made.until_trial([True, *[None] * 7], 2)
    assert made.until_trial([True] * 8, 2)
    made.rounds(20, [False] * 8, 4)
    assert not made.yields.allows(8)
    made.rounds(8, [False, *[None] * 7], 4)
    assert made.yields.allows(8)
