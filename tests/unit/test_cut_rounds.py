"""Drafters that say how sure they are: never much worse off for it, at whatever load and target."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from coordinator.acceptance import Acceptance
from coordinator.costs import Cost
from coordinator.policy import KPolicy
from coordinator.round_costs import RoundCosts

LIMIT, DRAFT_S = 7, 0.001
Seconds = Callable[[int, int], float]  # of a step, by draft tokens and sessions


def steep(k: int, sessions: int) -> float:
    """A target whose steps are bound by their rows, as on a CPU."""
    return (5 + 0.6 * sessions * (1 + k)) / 1e3


class Place:
    """One target, one drafter, and what is known of both; no round goes on by itself."""

    def __init__(self, seconds: Seconds, loads: tuple[int, ...] = (1,)) -> None:
        self.seconds, self.rng = seconds, random.Random(1)
        table = [Cost(k, n, 64, seconds(k, n)) for n in loads for k in (0, 1, 3, 7)]
        self.verify = RoundCosts(table)
        self.draft = RoundCosts([Cost(k, n, 64, DRAFT_S) for n in loads for k in (1, 7)])
        self.past = Acceptance()

    def policy(self) -> KPolicy:
        return KPolicy(self.verify, self.draft, self.past, 3, 32)

    def rate(self, chance: float, says: bool, sessions: int = 1, steps: int = 1500) -> float:
        """Tokens a second of a session of so many steps."""
        policy, step, tokens, spent = self.policy(), 0, 0, 0.0
        while step < steps:
            k = policy.choose(step, LIMIT, sessions, 64)
            if not k:
                run = max(1, min(33, policy.plain_steps(step)))
                spent, tokens, step = (
                    spent + run * self.seconds(0, sessions),
                    tokens + run,
                    step + run,
                )
                continue
            kept = policy.cut([chance] * k, sessions, 64) if says else k
            accepted = 0
            while accepted < kept and self.rng.random() < chance:
                accepted += 1
            took = self.seconds(kept, sessions)
            self.draft.note(k, sessions, 64, DRAFT_S)
            self.verify.note(kept, sessions, 64, took)
            policy.note(kept, accepted)
            spent, tokens, step = spent + took + DRAFT_S, tokens + accepted + 1, step + 1
        return tokens / spent


@pytest.mark.parametrize("rise", [0.1, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("chance", [0.3, 0.5])
def test_saying_costs_nothing_where_a_longer_step_takes_longer(rise: float, chance: float) -> None:
    rates = []
    for says in (False, True):
        place = Place(lambda k, _: 0.01 * (1 + rise * k))
        rates.append(sum(place.rate(chance, says) for _ in range(8)))
    assert rates[1] > 0.96 * rates[0]


def test_what_a_cut_saved_under_load_does_not_stop_a_session_alone() -> None:
    """Seconds that it saved there are more than a round takes here."""
    fresh, busy = Place(steep, (1, 64)), Place(steep, (1, 64))
    for _ in range(4):
        busy.rate(0.3, True, sessions=64, steps=400)
    assert busy.past.cuts.saves
    rates = [sum(place.rate(0.85, True) for _ in range(4)) for place in (fresh, busy)]
    assert rates[1] > 0.95 * rates[0]


def test_a_session_that_goes_elsewhere_tries_again() -> None:
    """Steps are counted anew there, so that a pause means nothing any more."""
    slow, fast = Place(lambda k, _: 0.01 + 0.006 * k), Place(lambda *_: 0.01)
    policy, step = slow.policy(), 0
    while step < 6000:
        k = policy.choose(step, LIMIT, 1, 64)
        if k:
            policy.note(k, 0)
        step += 1 if k else max(1, policy.plain_steps(step))
    assert policy.off
    fast.past.level = 3.0
    policy.forget()
    policy.use(fast.verify, fast.draft, fast.past)
    chosen = [policy.choose(step, LIMIT, 1, 64) for step in range(40)]
    assert not policy.off and sum(k > 0 for k in chosen) > 30


def test_a_session_alone_is_heard_though_many_were_before() -> None:
    """Of many in one step few need tell; of one, each."""
    place = Place(lambda *_: 0.01)
    costs = place.verify
    for _ in range(200):
        costs.note(3, 1000, 64, 0.2)
    for _ in range(20):
        costs.note(3, 1, 64, 0.01)
    curves = costs.curves(1, 64, 3)
    assert curves is not None and curves.driven[3] == pytest.approx(0.01, rel=0.05)
