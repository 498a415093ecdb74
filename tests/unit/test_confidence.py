"""Confidences of a drafter: calibrated online, and proposals cut where they do not pay."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from coordinator.acceptance import Acceptance, SessionLevel
from coordinator.confidence import Calibration
from coordinator.costs import Cost
from coordinator.cuts import Cuts
from coordinator.policy import KPolicy
from coordinator.round_costs import RoundCosts

LIMIT = 7
Seconds = Callable[[int], float]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def graded(chances: list[float], rng: random.Random) -> int:
    """How many leading tokens are right."""
    count = 0
    while count < len(chances) and rng.random() < chances[count]:
        count += 1
    return count


@pytest.mark.parametrize(
    ("slope", "offsets"),
    [
        pytest.param(1.0, [0.0] * 4, id="honest"),
        pytest.param(0.4, [-0.5] * 4, id="overconfident"),
        pytest.param(2.0, [1.0] * 4, id="timid"),
        pytest.param(1.0, [1.0, 0.3, -0.4, -1.0], id="worse-with-depth"),
    ],
)
def test_chances_become_those_of_the_world(slope: float, offsets: list[float]) -> None:
    """Said s means sigmoid(slope * logit(s) + offset): what the fit has to find."""
    rng, calibration = random.Random(3), Calibration()

    def one_round() -> tuple[list[float], list[float]]:
        said = [rng.uniform(0.2, 0.98) for _ in offsets]
        true = [
            sigmoid(slope * math.log(s / (1 - s)) + b) for s, b in zip(said, offsets, strict=True)
        ]
        return said, true

    for _ in range(4000):
        said, true = one_round()
        calibration.note(said, graded(true, rng))
    errors = []
    for _ in range(200):
        said, true = one_round()
        errors += [abs(a - b) for a, b in zip(calibration.chances(said), true, strict=True)]
    assert sum(errors) / len(errors) < 0.05


def test_nothing_that_is_said_breaks_it() -> None:
    """WC-9: what a drafter sends is a hint, numbers too."""
    calibration = Calibration()
    wild = [math.nan, math.inf, -math.inf, -3.0, 0.0, 1.0, 1e300]
    for accepted in (0, 3, 7) * 200:
        calibration.note(wild, accepted)
        assert all(0.0 <= chance <= 1.0 for chance in calibration.chances(wild))
    assert calibration.chances([]) == []
    # What is worse than chance is not turned round.
    liar = Calibration()
    for _ in range(500):
        liar.note([0.99], 0)
        liar.note([0.01], 1)
    assert liar.chances([0.9])[0] == pytest.approx(liar.chances([0.1])[0], abs=0.05)


def staircase(k: int) -> float:
    return 0.020 if k <= 3 else 0.032


def steep(k: int) -> float:
    return 0.017 + 0.004 * k


def flat(k: int) -> float:
    return 0.020


def speed(verify: Seconds, *, confident: bool, seed: int) -> float:
    """Tokens per second of a session whose drafter knows how sure it may be."""
    rng = random.Random(seed)
    policy = KPolicy(
        RoundCosts(Cost(k, 1, 100, verify(k)) for k in range(LIMIT + 1)),
        RoundCosts(Cost(k, 1, 100, 0.004 + 0.0003 * k) for k in (1, LIMIT)),
        Acceptance(),
        start=3,
    )
    tokens, seconds = 0, 0.0
    for step in range(3000):
        k = policy.choose(step, LIMIT, 1, 100)
        # Easy text and hard text: one round in three is easy.
        easy = rng.random() < 0.35
        chances = [0.95 if easy else 0.3] * k
        right = graded(chances, rng)
        kept = policy.cut(chances, 1, 100) if confident and k else k
        accepted = min(right, kept)
        seconds += verify(kept) + (0.004 + 0.0003 * k if k else 0.0)
        tokens += accepted + 1
        if k:
            policy.note(k, accepted)
    return tokens / seconds


@pytest.mark.parametrize("verify", [staircase, steep, flat])
def test_cutting_never_costs_and_pays_where_verifying_is_dear(verify: Seconds) -> None:
    with_cuts = sum(speed(verify, confident=True, seed=s) for s in range(6))
    without = sum(speed(verify, confident=False, seed=s) for s in range(6))
    assert with_cuts > 0.99 * without
    if verify is steep:
        assert with_cuts > 1.03 * without


def test_what_is_withheld_does_not_flatter_the_drafter() -> None:
    """Tokens past a cut count with their chances, weighed by how likely they are reached."""
    rng = random.Random(4)
    chances, session, past = [0.8, 0.6, 0.5, 0.2], SessionLevel(), Acceptance()
    for _ in range(4000):
        cut = rng.randrange(1, 5)
        past.note(session, 4, min(graded(chances, rng), cut), chances[cut:])
    assert past.chances(session, 0.0, 4) == pytest.approx(chances, abs=0.1)
    # Wrong before the cut: nothing is known beyond.
    new, session = Acceptance(), SessionLevel()
    new.note(session, 4, 1, [0.01, 0.01])
    assert new.chances(session, 0.0, 4)[2:] == [new.chances(session, 0.0, 2)[1]] * 2


def test_ties_are_kept_whole_and_unknown_costs_cut_nothing() -> None:
    costs = RoundCosts(Cost(k, 1, 100, 0.02) for k in range(8))
    policy = KPolicy(costs, RoundCosts([Cost(7, 1, 100, 0.004)]), Acceptance(), 3)
    k = policy.choose(0, LIMIT, 1, 100)
    assert policy.cut([0.01] * k, 1, 100) == k, "a step costs the same however many are verified"
    blind = KPolicy(RoundCosts(), RoundCosts(), Acceptance(), 3)
    assert blind.choose(0, LIMIT, 1, 100) == 3 and blind.cut([0.01] * 3, 1, 100) == 3


def test_a_sure_token_behind_an_unsure_one_is_cut_with_it() -> None:
    """AB-24: the block ends where the prefix stops paying; what comes behind counts only through
    it."""
    # A step of 1 s brings one token, and each token more to verify costs what half a token brings.
    verify = [1.0 + 0.5 * k for k in range(5)]
    assert Cuts().worth([0.9, 0.1, 0.9, 0.9], verify, 1.0) == 1
    assert Cuts().worth([0.9, 0.9, 0.9, 0.9], verify, 1.0) == 4
    assert Cuts().worth([0.1, 0.9, 0.9, 0.9], verify, 1.0) == 0
