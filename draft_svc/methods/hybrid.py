"""Lookup and a neural drafter behind one name: each round takes what promises more tokens a second.

The lookup costs next to nothing and is made every round, so what the target commits grades it
whether or not it was proposed. The neural drafter runs where it promises more, where the lookup
finds nothing, and every so often anyway, so that its grade does not grow stale. Both grades are
kept apart by how long the lookup's match is: that is what tells repeated text from new text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from draft_svc.gain import Average, Survival, tokens_per_second
from draft_svc.methods.base import AnyMethod, Draft, Method, MethodInfo, Request, RowBlock
from draft_svc.methods.ngram import NgramIndex, NgramMethod
from engine.api import Sampling, never
from engine.kv.pool import PoolStats

# Rounds that the lookup wins until the neural drafter has one to be graded in.
EXPLORE_EVERY = 32
# Where no step was timed yet: a proposal is taken to cost this share of one.
_ASSUMED_SHARE = 0.25
_LOOKUP_S = 2e-5
# Match lengths from which a class of matches begins; 0: no match.
_CLASSES = (0, 1, 3, 4, 6, 9, 16)

Source = tuple[str, int]


def match_class(length: int) -> int:
    return max(start for start in _CLASSES if start <= length)


@dataclass(slots=True)
class Asked:
    """The newest proposal of a session, or what it could have been: graded by what is committed
    next.
    """

    length: int
    match: int
    found: tuple[int, ...]
    neural: tuple[int, ...] = ()
    answered_at: float = 0.0


@dataclass(slots=True)
class HybridContext:
    index: NgramIndex
    neural: Any
    grades: dict[Source, Survival] = field(default_factory=dict)
    asked: Asked | None = None


class HybridMethod(Method[HybridContext]):
    """`owns_neural` is false where the neural drafter is hosted under its own name too, and is
    warmed up and counted there.
    """

    name = "hybrid"

    def __init__(
        self,
        lookup: NgramMethod,
        neural: AnyMethod,
        *,
        owns_neural: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lookup, self._neural, self._owns_neural = lookup, neural, owns_neural
        self._clock = clock
        self._grades: dict[Source, Survival] = {}
        self._neural_s, self._step_s = Average(), Average()
        self._unexplored = 0

    @property
    def info(self) -> MethodInfo:
        """The neural drafter's, except that there is no length at which the lookup ends."""
        info = self._neural.info
        return replace(
            info,
            method=self.name,
            name=f"{self._lookup.info.name}+{info.name}",
            max_length_tokens=0,
            rows_optional=True,
        )

    def open(self, ids: Sequence[int], sampling: Sampling) -> HybridContext:
        return HybridContext(self._lookup.open(ids, sampling), self._neural.open(ids, sampling))

    def restore(self, context: HybridContext, target: str) -> tuple[int, int]:
        return self._neural.restore(context.neural, target)

    def update(
        self, context: HybridContext, keep: int, tokens: Sequence[int], rows: Sequence[RowBlock]
    ) -> None:
        if tokens:
            self._learn(context, keep, tokens)
        self._lookup.update(context.index, keep, tokens, rows)
        self._neural.update(context.neural, keep, tokens, rows)

    def close(self, context: HybridContext) -> None:
        self._neural.close(context.neural)

    # -- learning --------------------------------------------------------------------------------

    def _learn(self, context: HybridContext, keep: int, tokens: Sequence[int]) -> None:
        asked, context.asked = context.asked, None
        if asked is None or asked.length != keep:
            return
        self._step_s.add(self._clock() - asked.answered_at)
        if asked.found:
            self.grade(context, "ngram", asked.match).grade(asked.found, tokens)
        if asked.neural:
            self.grade(context, "neural", asked.match).grade(asked.neural, tokens)

    def grade(self, context: HybridContext, source: str, match: int) -> Survival:
        """A session's grade of a source after a match of this length, 0 for none."""
        key = (source, match_class(match))
        if key not in context.grades:
            of_class = self._grades.setdefault(
                key, Survival(self._grades.setdefault((source, -1), Survival()))
            )
            context.grades[key] = Survival(of_class)
        return context.grades[key]

    # -- choosing --------------------------------------------------------------------------------

    def propose(self, requests: Sequence[Request[HybridContext]]) -> list[Draft]:
        for request in requests:
            context = request.context
            match, found = context.index.lookup(request.k)
            context.asked = Asked(context.index.length, match, found)
        running = [request for request in requests if self._neural_is_better(request)]
        neural = dict(zip(map(id, running), self._run_neural(running), strict=True))
        now = self._clock()
        drafts = []
        for request in requests:
            asked = request.context.asked
            assert asked is not None
            asked.answered_at = now
            draft = neural.get(id(request), Draft())
            if draft.ids:
                asked.neural = draft.ids
                drafts.append(draft._replace(source=self._neural.info.method))
            elif asked.found:
                drafts.append(Draft(asked.found, source=self._lookup.name))
            else:
                drafts.append(draft)
        return drafts

    def _run_neural(self, requests: Sequence[Request[HybridContext]]) -> list[Draft]:
        """One forward for all; its time is what a proposal costs each of them."""
        if not requests:
            return []
        most, began = self._neural.info.max_draft_tokens, self._clock()
        once_before = self._neural.once_ns
        drafts = self._neural.propose(
            [Request(r.context.neural, min(r.k, most), r.deadline) for r in requests]
        )
        if any(draft.ids for draft in drafts):
            # What is not spent again, such as the capture of a graph, is no cost of a proposal.
            once_s = (self._neural.once_ns - once_before) / 1e9
            self._neural_s.add(max(0.0, self._clock() - began - once_s))
        return drafts

    def _neural_is_better(self, request: Request[HybridContext]) -> bool:
        context, asked = request.context, request.context.asked
        assert asked is not None
        if not asked.found:
            return True
        neural_s = self._neural_s.value
        step_s = self._step_s.value or neural_s / _ASSUMED_SHARE or 1.0
        ours = self.grade(context, "neural", asked.match).expected(request.k)
        lookup = self.grade(context, "ngram", asked.match).expected(request.k)
        better = tokens_per_second(ours, neural_s, step_s) > tokens_per_second(
            lookup, _LOOKUP_S, step_s
        )
        self._unexplored = 0 if better else self._unexplored + 1
        if self._unexplored == EXPLORE_EVERY:
            self._unexplored = 0
            return True
        return better

    # -- the rest --------------------------------------------------------------------------------

    def work(self) -> bool:
        return self._owns_neural and self._neural.work()

    @property
    def once_ns(self) -> int:
        return self._neural.once_ns

    def stats(self) -> PoolStats:
        return self._neural.stats() if self._owns_neural else super().stats()

    def check_integrity(self) -> None:
        self._neural.check_integrity()

    def warm_up(self, stopped: Callable[[], bool] = never) -> None:
        if self._owns_neural:
            self._neural.warm_up(stopped)
