"""K per round, against simulated acceptance and costs: the best fixed K is the reference."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from coordinator.acceptance import Acceptance, SessionLevel
from coordinator.costs import Cost, Costs, CostTable
from coordinator.policy import KPolicy
from coordinator.round_costs import RoundCosts

LIMIT = 7
Seconds = Callable[[int], float]


class World:
    """Draft tokens accepted with a chance that falls by position; times with some jitter."""

    def __init__(self, rate: float, verify: Seconds, draft: Seconds, seed: int = 1) -> None:
        self.rate, self.verify, self.draft = rate, verify, draft
        self.rng = random.Random(seed)

    def tokens_per_second(self, k: int) -> float:
        """What a fixed K gives, from the equation."""
        tokens = sum(self.rate**i for i in range(k + 1))
        return tokens / (self.verify(k) + (self.draft(k) if k else 0.0))

    def best(self) -> tuple[int, float]:
        return max(((k, self.tokens_per_second(k)) for k in range(LIMIT + 1)), key=lambda e: e[1])

    def accepted(self, k: int) -> int:
        count = 0
        while count < k and self.rng.random() < self.rate:
            count += 1
        return count

    def run(
        self, policy: KPolicy, costs: tuple[RoundCosts, RoundCosts], rounds: int, at: int = 0
    ) -> float:
        """Tokens per second of a session that follows the policy."""
        tokens, seconds, step = 0, 0.0, at
        for _ in range(rounds):
            k = policy.choose(step, LIMIT, 1, 100)
            accepted = self.accepted(k)
            verify = self.verify(k) * self.rng.uniform(0.9, 1.1)
            draft = self.draft(k) * self.rng.uniform(0.9, 1.1) if k else 0.0
            costs[0].note(k, 1, 100, verify)
            if k:
                costs[1].note(k, 1, 100, draft)
                policy.note(k, accepted)
            tokens, seconds, step = tokens + accepted + 1, seconds + verify + draft, step + 1
        return tokens / seconds


def flat(k: int) -> float:
    return 0.020


def steep(k: int) -> float:
    return 0.020 * (1 + 0.3 * k)


def block(k: int) -> float:
    return 0.004


def chain(k: int) -> float:
    return 0.003 * k


CASES = [
    (rate, verify, draft)
    for rate in (0.3, 0.6, 0.8, 0.95)
    for verify in (flat, steep)
    for draft in (block, chain)
]


@pytest.mark.parametrize(("rate", "verify", "draft"), CASES)
def test_it_comes_near_the_best_fixed_k_without_a_table(
    rate: float, verify: Seconds, draft: Seconds
) -> None:
    found = []
    for seed in range(5):
        world = World(rate, verify, draft, seed)
        costs = RoundCosts(), RoundCosts()
        policy = KPolicy(*costs, Acceptance(), start=3)
        world.run(policy, costs, 100)
        found.append(world.run(policy, costs, 2000, at=100))
    assert sum(found) / len(found) > 0.95 * world.best()[1]


def test_times_of_a_busy_machine_cost_little() -> None:
    """Steps take half or double what they take on average, and so do those of the table."""
    rng = random.Random(5)

    def noisy(seconds: float) -> float:
        return seconds * rng.lognormvariate(0, 0.4)

    def verify(k: int) -> float:
        return 0.020 if k <= 3 else 0.031

    world = World(0.65, verify, lambda k: 0.005 + 0.0002 * k)
    found = []
    for _ in range(6):
        costs = (
            RoundCosts(Cost(k, 1, 100, noisy(verify(k))) for k in (0, 3, 7)),
            RoundCosts(Cost(k, 1, 100, noisy(world.draft(k))) for k in (1, 7)),
        )
        policy = KPolicy(*costs, Acceptance(), start=3)
        tokens = seconds = 0.0
        for step in range(1500):
            k = policy.choose(step, LIMIT, 1, 100)
            accepted = world.accepted(k)
            costs[0].note(k, 1, 100, noisy(verify(k)))
            if k:
                costs[1].note(k, 1, 100, noisy(world.draft(k)))
                policy.note(k, accepted)
            tokens += accepted + 1
            seconds += verify(k) + (world.draft(k) if k else 0.0)
        found.append(tokens / seconds)
    assert sum(found) / len(found) > 0.93 * world.best()[1]


def test_a_table_finds_the_k_before_anything_is_measured() -> None:
    """The first choice comes from the table alone, at the load and context asked for."""
    verify = RoundCosts(
        Cost(k, sessions, context, 0.02 * (1 + 0.4 * (sessions - 1) * k) + context * 1e-6)
        for k in (0, 3, 7)
        for sessions in (1, 4)
        for context in (64, 1024)
    )
    draft = RoundCosts([Cost(7, 1, 64, 0.004)])
    past, session = Acceptance(), SessionLevel()
    for _ in range(100):
        past.note(session, 7, 6)
    assert KPolicy(verify, draft, past, 3).choose(0, 7, 1, 100) == 7
    assert KPolicy(verify, draft, past, 3).choose(0, 7, 4, 100) < 7


def test_a_long_context_switches_it_off_where_the_draft_costs_more_than_it_saves() -> None:
    """DF-42: the draft attends over its whole context each round; at a length it stops paying."""
    verify = RoundCosts(
        Cost(k, s, c, 0.014) for k in (0, 7) for s in (1, 16) for c in (2_000, 185_000)
    )
    seconds = {(2_000, 1): 0.004, (185_000, 1): 0.07, (2_000, 16): 0.01, (185_000, 16): 0.2}
    draft = RoundCosts(Cost(7, s, c, value) for (c, s), value in seconds.items())
    past, session = Acceptance(), SessionLevel()
    rng = random.Random(0)
    for _ in range(500):
        accepted = 0
        while accepted < 7 and rng.random() < 0.7:
            accepted += 1
        past.note(session, 7, accepted)
    chosen = {at: KPolicy(verify, draft, past, 3).choose(0, 7, at[1], at[0]) for at in seconds}
    assert chosen[2_000, 1] == 7 and chosen[2_000, 16] > 0
    assert chosen[185_000, 1] == chosen[185_000, 16] == 0


def test_poor_acceptance_switches_off_and_good_acceptance_on_again() -> None:
    """The same K = 0 as a fixed one but for rare probes, which find when it pays again."""
    costs = RoundCosts(), RoundCosts()
    policy = KPolicy(*costs, Acceptance(), start=3)
    poor = World(0.05, flat, lambda k: 0.010)
    poor.run(policy, costs, 300)
    probes: list[int] = []
    for step in range(300, 1300):
        if k := policy.choose(step, LIMIT, 1, 100):
            policy.note(k, 0)
            probes.append(step)
    assert 0 < len(probes) < 30
    assert policy.plain_steps(1299) >= 0
    good = World(0.9, flat, lambda k: 0.010)
    good.run(policy, costs, 600, at=1300)
    assert good.run(policy, costs, 1000, at=1900) > 0.95 * good.best()[1]


def test_the_drafters_past_is_a_prior_for_new_sessions() -> None:
    costs = (
        RoundCosts([Cost(0, 1, 64, 0.02), Cost(7, 1, 64, 0.03)]),
        RoundCosts([Cost(1, 1, 64, 0.002)]),
    )
    good, poor = Acceptance(), Acceptance()
    well, badly = SessionLevel(), SessionLevel()
    for _ in range(100):
        good.note(well, 7, 7)
        poor.note(badly, 7, 0)
    assert KPolicy(*costs, good, 3).choose(0, 7, 1, 64) == 7
    assert KPolicy(*costs, poor, 3).choose(0, 7, 1, 64) == 0


def test_one_hiccup_does_not_banish_a_k() -> None:
    costs = Costs()
    for _ in range(50):
        costs.note(3, 1, 64, 0.02)
    costs.note(3, 1, 64, 60.0)
    curve = costs.curve(1, 64, 3)
    assert curve is not None and curve[3] < 0.03


def test_times_between_and_beyond_what_was_measured() -> None:
    table = CostTable([Cost(0, 1, 64, 1.0), Cost(4, 1, 64, 3.0), Cost(0, 8, 64, 5.0)])
    assert [table.seconds(k, 1, 64) for k in (0, 2, 4, 6)] == [1.0, 2.0, 3.0, 4.0]
    assert table.seconds(6, 9, 64) == 5.0
    disturbed = CostTable([Cost(0, 1, 64, 9.0), Cost(4, 1, 64, 3.0), Cost(7, 1, 64, 4.5)])
    assert [disturbed.seconds(k, 1, 64) for k in (0, 4, 5)] == [3.0, 3.0, 3.5]
    costs = Costs([Cost(0, 1, 64, 1.0), Cost(4, 1, 64, 3.0)])
    costs.note(0, 1, 64, 2.0)
    # What was seen at one K corrects the others by the same share.
    assert costs.curve(1, 64, 4) == pytest.approx([2.0, 3.0, 4.0, 5.0, 6.0])


def test_a_few_bad_rounds_at_the_start_switch_nothing_off() -> None:
    costs = RoundCosts(), RoundCosts()
    policy = KPolicy(*costs, Acceptance(), start=3)
    asked = []
    for step in range(30):
        k = policy.choose(step, LIMIT, 1, 64)
        asked.append(k)
        costs[0].note(k, 1, 64, 0.02)
        if k:
            costs[1].note(k, 1, 64, 0.02)
            policy.note(k, 0)
    assert all(asked[:8]) and not any(asked[8:16])


def test_what_was_seen_at_one_load_corrects_the_others() -> None:
    table = [Cost(k, s, 64, 0.01 * s + 0.001 * k) for k in (0, 4) for s in (1, 4)]
    costs = Costs(table)
    for k in (0, 4):
        costs.note(k, 1, 64, 2 * (0.01 + 0.001 * k))
    assert costs.curve(4, 64, 4) == pytest.approx([2 * (0.04 + 0.001 * k) for k in range(5)])


def test_nothing_known_gives_the_start() -> None:
    assert KPolicy(RoundCosts(), RoundCosts(), Acceptance(), 3).choose(0, 7, 1, 64) == 3
    assert KPolicy(RoundCosts(), RoundCosts(), Acceptance(), 3).choose(0, 2, 1, 64) == 2


def test_a_choice_costs_microseconds() -> None:
    """Below 20 us on a quiet core; the best of several runs, with room for a busy machine."""
    costs = (
        RoundCosts([Cost(0, 1, 64, 0.02), Cost(7, 1, 64, 0.03)]),
        RoundCosts([Cost(7, 1, 64, 0.002)]),
    )
    policy = KPolicy(*costs, Acceptance(), 3)
    best = 1.0
    for _ in range(20):
        before = time.perf_counter()
        for step in range(200):
            k = policy.choose(step, LIMIT, 12, 300)
            costs[0].note(k, 12, 300, 0.02)
            costs[1].note(k, 12, 300, 0.002)
            policy.note(k, 3)
        best = min(best, (time.perf_counter() - before) / 200)
    assert best < 60e-6, f"{best * 1e6:.1f} us"
    print(f"{best * 1e6:.1f} us")
