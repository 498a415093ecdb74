"""What a verdict of a run ahead says of times: whose they are, and how much is believed."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

from coordinator.breaker import Breaker
from coordinator.record import Record
from coordinator.round_costs import RoundCosts
from coordinator.run_ahead import RunAhead
from coordinator.standing import Standing
from coordinator.steps import Steps
from specwire.v1 import target_pb2

_MS = 10**6


def run_of(standing: Standing) -> RunAhead:
    choice = SimpleNamespace(standing=standing, worker=SimpleNamespace(busy=1))
    target = SimpleNamespace(vocab_size=1000, busy=1)
    at = SimpleNamespace(choice=choice, target=target, dropped=lambda cause: None, told=0)
    nothing = cast(Any, SimpleNamespace())
    run = RunAhead(cast(Any, at), nothing, nothing, Record("toy"))
    run.begin(7, 8)
    return run


def verdict(reason: str = "", **timings: int) -> target_pb2.Verdict:
    made = target_pb2.Verdict(step_id=3, base_len=18, new_len=20, tokens=[1, 2])
    made.proposal.step_id, made.proposal.base_len, made.proposal.reason = 3, 20, reason
    for name, value in timings.items():
        setattr(made.proposal.timings, name, value)
    return made


def test_what_a_draft_calls_spent_once_is_believed_up_to_a_limit() -> None:
    standing = Standing(Breaker(3, 2.0), RoundCosts())
    standing.once_left_ns = 10 * _MS
    run, found = run_of(standing), verdict(once_ns=50 * _MS)
    run.believe(found)
    assert found.proposal.timings.once_ns == 10 * _MS
    assert found.proposal.timings.queue_ns == 40 * _MS
    again = verdict(once_ns=50 * _MS)
    run.believe(again)
    assert (again.proposal.timings.once_ns, again.proposal.timings.queue_ns) == (0, 50 * _MS)


def test_a_late_draft_pays_for_its_wait_and_the_target_does_not() -> None:
    standing, noted = Standing(Breaker(3, 2.0), RoundCosts()), []
    run, record = run_of(standing), Record("toy")
    run.advance(verdict("late", queue_ns=30 * _MS), list(range(20)), 100)
    curve = standing.costs.ahead.curve(1, 20, 7)
    assert curve is not None and curve[7] > 0.029
    steps = Steps(None, record)
    steps._target = cast(Any, SimpleNamespace(note_round=noted.append, note_cost=lambda *_: None))
    steps._verdict_ns = began = time.perf_counter_ns()
    late = verdict("late", queue_ns=30 * _MS)
    late.timings.compute_ns = 5 * _MS
    steps.account(late, began + 36 * _MS, 0, 0)
    assert 0.005 <= noted[0] < 0.007
    assert record.phase_ns["draft"] == 30 * _MS
