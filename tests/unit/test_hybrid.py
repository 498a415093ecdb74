"""The choice between lookup and a neural drafter: what is learned, and what is chosen for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

import pytest

from draft_svc.gain import Average, Survival
from draft_svc.methods.base import (
    REASON_ROWS_MISSING,
    Draft,
    Method,
    MethodInfo,
    Request,
    RowBlock,
    RowNeeds,
)
from draft_svc.methods.hybrid import EXPLORE_EVERY, HybridContext, HybridMethod, match_class
from draft_svc.methods.ngram import NgramMethod
from engine.api import Sampling

K = 4


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Oracle(Method[list[int]]):
    """Knows the text that comes, and is right about each token with probability `skill`."""

    name: ClassVar[str] = "oracle"

    def __init__(self, clock: Clock, skill: float, cost_s: float = 0.01) -> None:
        self.clock, self.skill, self.cost_s = clock, skill, cost_s
        self.once_s = 0.0
        self.text: Sequence[int] = ()
        self.reason = ""
        self.calls = self.spent_once_ns = 0
        self.contexts: list[list[int]] = []
        self._chance = random.Random(1)

    @property
    def info(self) -> MethodInfo:
        return MethodInfo("oracle", "oracle", K, max_length_tokens=9, rows=RowNeeds((1,), 2))

    @property
    def once_ns(self) -> int:
        return self.spent_once_ns

    def open(self, ids: Sequence[int], sampling: Sampling) -> list[int]:
        self.contexts.append(list(ids))
        return self.contexts[-1]

    def update(
        self, context: list[int], keep: int, tokens: Sequence[int], rows: Sequence[RowBlock]
    ) -> None:
        del context[keep:]
        context += tokens

    def propose(self, requests: Sequence[Request[list[int]]]) -> list[Draft]:
        self.calls += 1
        self.clock.now += self.cost_s + self.once_s
        self.spent_once_ns += int(self.once_s * 1e9)
        if self.reason:
            return [Draft(reason=self.reason) for _ in requests]
        return [self._draft(request) for request in requests]

    def _draft(self, request: Request[list[int]]) -> Draft:
        at = len(request.context)
        true = self.text[at : at + request.k]
        return Draft(tuple(t if self._chance.random() < self.skill else 10**6 for t in true))

    def close(self, context: list[int]) -> None:
        self.contexts.remove(context)


def pair(skill: float, cost_s: float = 0.01) -> tuple[HybridMethod, Oracle, Clock]:
    clock = Clock()
    oracle = Oracle(clock, skill, cost_s)
    lookup = NgramMethod(min_n=2, max_n=4, max_draft_tokens=K)
    return HybridMethod(lookup, oracle, owns_neural=True, clock=clock), oracle, clock


def follow(
    method: HybridMethod, oracle: Oracle, clock: Clock, text: Sequence[int], step_s: float = 0.04
) -> list[str]:
    """A session that says `text`: the source of each round's proposal."""
    oracle.text, begin = text, 2
    context = method.open(text[:begin], Sampling())
    sources, at = [], begin
    while at + K + 1 < len(text):
        (draft,) = method.propose([Request(context, K)])
        sources.append(draft.source)
        clock.now += step_s
        accepted = 0
        while accepted < len(draft.ids) and draft.ids[accepted] == text[at + accepted]:
            accepted += 1
        tokens = text[at : at + accepted + 1]
        method.update(context, at, tokens, ())
        at += len(tokens)
    assert list(context.index.ids) == list(context.neural) == list(text[:at])
    method.close(context)
    return sources


def fresh_text(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(range(10**5), count)


def share(sources: Sequence[str], source: str) -> float:
    return sources.count(source) / len(sources)


def test_repeated_text_is_looked_up_and_new_text_is_not() -> None:
    method, oracle, clock = pair(skill=0.7)
    sources = follow(method, oracle, clock, fresh_text(30) * 40)
    assert share(sources[30:], "ngram") >= 0.9
    sources = follow(method, oracle, clock, fresh_text(600, seed=1))
    assert set(sources) == {"oracle"}


def test_a_lookup_that_misleads_is_left_to_the_neural_drafter() -> None:
    # Two tokens repeat all the time and never go on the same way.
    fresh = iter(fresh_text(4000))
    text = [token for _ in range(600) for token in (1, 2, next(fresh), next(fresh))]
    method, oracle, clock = pair(skill=0.9)
    sources = follow(method, oracle, clock, text)
    assert share(sources[50:], "oracle") >= 0.95


def test_an_expensive_drafter_loses_to_a_fair_lookup_and_a_cheap_one_wins() -> None:
    # What was said after the pair the last time is said again about half of the time.
    chance = random.Random(5)
    words = [fresh_text(4, seed=seed) for seed in (1, 2)]
    text = [token for _ in range(600) for token in (7, 8, *words[chance.random() < 0.5])]
    taken = {}
    for cost_s in (0.001, 0.2):
        method, oracle, clock = pair(skill=0.99, cost_s=cost_s)
        taken[cost_s] = share(follow(method, oracle, clock, text)[100:], "oracle")
    assert taken[0.001] > 0.5 > taken[0.2]


def test_the_neural_drafter_is_tried_again_from_time_to_time() -> None:
    method, oracle, clock = pair(skill=0.0)
    text = fresh_text(20) * 100
    sources = follow(method, oracle, clock, text)
    assert sources[-4 * EXPLORE_EVERY :].count("oracle") in (3, 4, 5)


def test_what_is_spent_once_is_no_cost_of_the_neural_drafter() -> None:
    method, oracle, _ = pair(skill=1.0)
    oracle.text, oracle.once_s = fresh_text(20), 0.3
    context = method.open(oracle.text[:2], Sampling())
    method.propose([Request(context, K)])
    assert method._neural_s.value == pytest.approx(oracle.cost_s)


@pytest.mark.parametrize("skill", [0.2, 0.6, 0.9])
def test_estimates_converge_to_the_truth(skill: float) -> None:
    chance, survival = random.Random(3), Survival(Survival())
    for _ in range(2000):
        committed = [1] * (K + 1)
        proposed = [1 if chance.random() < skill else 0 for _ in range(K)]
        accepted = [*proposed, 0].index(0)
        survival.grade(proposed, committed[: accepted + 1])
    # Counts that fade by 2 % a token are worth 50 tokens: three standard errors.
    spread = 3 * (skill * (1 - skill) / 50) ** 0.5
    assert survival.chances(1)[0] == pytest.approx(skill, abs=spread)
    expected = sum(skill**i for i in range(1, K + 1))
    assert survival.expected(K) == pytest.approx(expected, rel=0.35, abs=0.1)


def test_nothing_is_learned_behind_the_first_wrong_token() -> None:
    survival = Survival()
    for _ in range(100):
        survival.grade([1, 9, 3, 4], [1, 2])
    first, second, third, _ = survival.chances(4)
    assert first > 0.9 and second < 0.1
    assert third == pytest.approx(second)  # never seen: as good as the one before


def test_what_was_proposed_for_another_length_is_not_graded() -> None:
    method, oracle, _ = pair(skill=1.0)
    oracle.text = text = fresh_text(40)
    context = method.open(text[:10], Sampling())
    method.propose([Request(context, K)])
    before = method.grade(context, "neural", 0).chances(K)
    method.update(context, 8, [5], ())  # taken back: not what the proposal continued
    assert method.grade(context, "neural", 0).chances(K) == before
    method.propose([Request(context, K)])
    method.update(context, 9, [], ())  # rows that came late
    assert method.grade(context, "neural", 0).chances(K) == before
    method.update(context, 9, [5], ())
    assert method.grade(context, "neural", 0).chances(K) != before


def test_a_lookup_stands_in_where_the_neural_drafter_cannot() -> None:
    method, oracle, _ = pair(skill=1.0)
    oracle.reason = REASON_ROWS_MISSING
    repeating: HybridContext = method.open([5, 6, 7, 8, 5, 6], Sampling())
    new = method.open([1, 2, 3], Sampling())
    drafts = method.propose([Request(repeating, 3), Request(new, 3)])
    drafts = method.propose([Request(repeating, 3), Request(new, 3)])
    assert drafts[1] == Draft(reason=REASON_ROWS_MISSING)
    assert drafts[0] == Draft((7, 8, 5), source="ngram")
    method.close(repeating)
    method.close(new)
    assert not oracle.contexts


def test_one_forward_serves_all_sessions_that_want_it() -> None:
    method, oracle, _ = pair(skill=1.0)
    oracle.text = fresh_text(100)
    contexts = [method.open(oracle.text[: 5 + n], Sampling()) for n in range(64)]
    drafts = method.propose([Request(context, 2) for context in contexts])
    assert oracle.calls == 1 and {len(draft.ids) for draft in drafts} == {2}


def test_the_handshake_is_the_neural_drafters_without_its_limit() -> None:
    info = pair(skill=1.0)[0].info
    assert info.method == "hybrid" and info.rows == RowNeeds((1,), 2) and info.rows_optional
    assert info.max_length_tokens == 0


def test_an_outlier_moves_an_average_little() -> None:
    average = Average()
    for _ in range(50):
        average.add(1.0)
    average.add(1000.0)
    assert average.value == pytest.approx(1.3)


def test_match_classes_cover_every_length() -> None:
    assert [match_class(length) for length in (0, 1, 2, 3, 5, 16)] == [0, 1, 1, 3, 4, 16]


class Capturing(Oracle):
    """Its third proposal meets a new shape, which takes 2 s once."""

    spent_ns = 0

    @property
    def once_ns(self) -> int:
        return self.spent_ns

    def propose(self, requests: Sequence[Request[list[int]]]) -> list[Draft]:
        if self.calls == 2:
            self.spent_ns += 2 * 10**9
            self.clock.now += 2.0
        return super().propose(requests)


def test_what_is_spent_once_does_not_make_the_neural_drafter_dear() -> None:
    clock = Clock()
    oracle = Capturing(clock, skill=0.9)
    lookup = NgramMethod(min_n=2, max_n=4, max_draft_tokens=K)
    method = HybridMethod(lookup, oracle, owns_neural=True, clock=clock)
    follow(method, oracle, clock, fresh_text(60))
    assert method._neural_s.value == pytest.approx(oracle.cost_s)
