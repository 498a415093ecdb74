"""One session's rounds in simulated time: the real plan, drafting, steps and policy, with a target
and a draft service that take as long as they are told to."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.breaker import Breaker
from coordinator.colocated import Colocated
from coordinator.costs import Cost
from coordinator.drafting import Drafting
from coordinator.plan import Plan
from coordinator.record import Record
from coordinator.round_costs import RoundCosts
from coordinator.separate import Separate
from coordinator.settings import CoordinatorSettings
from coordinator.standing import Standing
from coordinator.steps import Steps
from coordinator.target_worker import TargetWorker
from specwire.v1 import common_pb2, target_pb2

LIMIT = 3


class RoundWorld:
    """Times in milliseconds: a `step` of the target, longer by the share `rise` for each draft
    token behind the first, a `draft`, a hop `here` between the coordinator and either of them, and
    a hop `there` between the two. The drafter may be `beside` the target, which may be too `old` to
    run ahead with it; it may say (`says`) how sure it is."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        step: float,
        draft: float,
        here: float,
        there: float,
        direct: bool = True,
        *,
        rise: float = 0.0,
        says: bool = False,
        beside: bool = False,
        old: bool = False,
        seed: int = 1,
    ) -> None:
        self.step, self.rise, self.draft, self.here, self.there = step, rise, draft, here, there
        self.says, self.old = says, old
        # Chances of a token to be accepted, of which each proposal has one; that of the latest.
        self.now, self.rng, self.chances, self.likely = 0, random.Random(seed), [0.6], 0.6
        # Steps that were asked for; the others came unasked.
        self.asked = 0
        # Answers of the target, and of the draft on the link, with their arrivals.
        self.verdicts: deque[tuple[int, target_pb2.Verdict]] = deque()
        self.answers: deque[tuple[int, common_pb2.Proposal]] = deque()
        clock = SimpleNamespace(perf_counter=lambda: self.now / 1e9, perf_counter_ns=self._clock)
        for name in ("steps", "separate", "brought"):
            monkeypatch.setattr(f"coordinator.{name}.time", clock)
        settings = CoordinatorSettings(num_speculative_tokens=3)
        self.target = TargetWorker("unix:/none", settings, 1, cast(Any, None))
        table = [Cost(k, 1, 64, self._step(k) / 1e3) for k in range(LIMIT + 1)]
        self.target.costs = RoundCosts(table)
        self.target.vocab_size, self.target.link = 1000, cast(Any, self)
        self.sessions, self.load_sessions = 1, 0  # of the link
        table = [Cost(k, 1, 64, draft / 1e3) for k in (1, LIMIT)]
        self.standing = Standing(Breaker(3, 2.0), RoundCosts(table))
        drafter = SimpleNamespace(
            max_draft_tokens=LIMIT, max_length_tokens=0, method="toy", needs_rows=False
        )
        choice = SimpleNamespace(
            standing=self.standing,
            drafter=drafter,
            placement="colocated" if beside else "separate",
            worker=SimpleNamespace(busy=1),
        )
        self.at: Any = SimpleNamespace(
            choice=choice,
            target=self.target,
            mail=SimpleNamespace(failed=False, take=lambda: None, get=self._answer),
            attached=True,
            away=None,
            yields_with=lambda c: self.target.yields(c.drafter.method, c.placement),
            colocated=beside,
            direct=direct and not beside,
            grace_s=0.0,
            given_up=False,
            told=0,
            advance=self._advance,
            capped=lambda limit: limit,
            dropped=lambda cause: None,
        )
        self.begin()

    def begin(self) -> None:
        """Another session, with the same workers and what is known of them."""
        self.record, settings = Record("toy"), CoordinatorSettings(num_speculative_tokens=3)
        self.plan = Plan(self.at, settings, self.record, LIMIT, True)
        kind = Colocated if self.at.colocated else Separate
        self.drafting: Drafting = kind(self.at, self.plan, settings, self.record)
        self.steps = Steps(None, self.record)
        self.steps.open(self.target, target_pb2.OpenTarget(), common_pb2.SessionKey())
        self.verdicts.clear()
        self.answers.clear()
        self.ids = [1]

    def _clock(self) -> int:
        return self.now

    def _step(self, k: int) -> float:
        return self.step * (1 + self.rise * max(0, k - 1))

    # -- the target and its link -----------------------------------------------------------------

    def open_mailbox(self, key: Any) -> Any:
        return SimpleNamespace(may_wait=0)

    def send(self, item: target_pb2.TargetItem) -> bool:
        if item.HasField("verify"):
            self.asked += 1
            self._steps_of(item.verify)
        return True

    def _steps_of(self, verify: target_pb2.Verify) -> None:
        at, drafted, length = self.now + _ns(self.here), len(verify.draft_ids), verify.base_len
        ahead = verify.drafts_ahead and not self.old
        for number in range(1 + verify.free_run):
            accepted = 0
            while accepted < drafted and self.rng.random() < self.likely:
                accepted += 1
            step_id = verify.step_id + number
            verdict = target_pb2.Verdict(step_id=step_id, base_len=length, accepted=accepted)
            verdict.tokens.extend([1] * (accepted + 1))
            length = verdict.new_len = length + accepted + 1
            verdict.timings.compute_ns = _ns(self._step(drafted))
            at += verdict.timings.compute_ns
            drafted = 0
            if verify.then_propose and (ahead or number == verify.free_run):
                drafted = verify.then_propose
                at += _ns(2 * self.there + self.draft)
                verdict.proposal.CopyFrom(self._proposal(step_id, length, drafted))
                verdict.proposal.timings.queue_ns = _ns(2 * self.there)
            self.verdicts.append((at + _ns(self.here), verdict))

    # -- the draft and its link ------------------------------------------------------------------

    def _proposal(self, step_id: int, length: int, k: int) -> common_pb2.Proposal:
        made = common_pb2.Proposal(step_id=step_id, base_len=length, ids=[1] * k)
        made.timings.compute_ns = _ns(self.draft)
        self.likely = self.rng.choice(self.chances) if len(self.chances) > 1 else self.chances[0]
        made.confidences.extend([self.likely] * k if self.says else [])
        return made

    def _advance(self, step_id: int, ids: list[int], k: int, *rest: Any) -> bool:
        self.answers.clear()
        self.at.told = len(ids)
        if k:
            arrives = self.now + _ns(2 * self.here + self.draft)
            self.answers.append((arrives, self._proposal(step_id, len(ids), k)))
        return True

    async def _answer(self, limit: float) -> tuple[int, common_pb2.Proposal]:
        self.now, found = self.answers.popleft()
        return self.now, found

    # -- the session -----------------------------------------------------------------------------

    async def rounds(self, count: int) -> tuple[list[int], float]:
        """Draft tokens of as many rounds, and tokens a millisecond."""
        began, length, before = self.now, len(self.ids), len(self.record.drafted)
        if not self.verdicts:
            self._send([])
        while len(self.record.drafted) < before + count:
            await self._round()
        rate = (len(self.ids) - length) * 1e6 / (self.now - began)
        return self.record.drafted[before:], rate

    async def _round(self) -> None:
        """As `Session` goes through one."""
        arrived, verdict = self.verdicts.popleft()
        self.now = max(self.now, arrived)
        assert self.steps.fits(verdict, len(self.ids))
        self.drafting.judged(verdict.accepted)
        self.plan.came(len(verdict.tokens), self.now / 1e9)
        self.drafting.believe(verdict)
        waited_ns, drafted_ns = self.drafting.waited_ns, self.drafting.drafted_ns
        self.steps.account(verdict, self.now, waited_ns, drafted_ns)
        self.ids.extend(verdict.tokens)
        unasked = self.steps.unasked
        most = None if unasked and not self.steps.drafts_ahead else LIMIT
        self.drafting.advance(verdict, self.ids, most)
        draft = self.drafting.in_hand
        if unasked:
            self.steps.follow(len(draft or ()))
        else:
            self._send(await self.drafting.proposal() if draft is None else draft)

    def _send(self, draft: list[int]) -> None:
        run = 0 if draft else self.plan.free_run()
        length = len(self.ids) + 1 + run + len(draft)
        step = self.steps.step + 1 + run
        k, ahead = self.drafting.then_propose(step, length, LIMIT, bool(draft))
        self.steps.verify(len(self.ids), draft, run or ahead, k, ahead > 0)


def _ns(milliseconds: float) -> int:
    return round(milliseconds * 1e6)
