"""Where the time of a round goes, as the coordinator accounts for it."""

from __future__ import annotations

from typing import Any

from coordinator.acceptance import Acceptance
from coordinator.costs import Cost
from coordinator.mailbox import Mailbox
from coordinator.policy import KPolicy
from coordinator.record import Record
from coordinator.round_costs import RoundCosts
from coordinator.settings import CoordinatorSettings
from coordinator.steps import Steps
from specwire.v1 import common_pb2, target_pb2

MS = 1_000_000


class _Target:
    """Keeps what it is told of rounds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.costs: list[tuple[int, int, bool, int]] = []
        self.link: Any = self

    def open_mailbox(self, key: Any) -> Mailbox:
        return Mailbox()

    def send(self, item: Any) -> bool:
        return True

    def note_round(self, seconds: float) -> None:
        self.seconds.append(seconds)

    def note_cost(self, drafted: int, length: int, seconds: float, ahead: bool) -> None:
        self.costs.append((drafted, length, ahead, round(seconds * 1e3)))


def verdict(step_id: int, compute_ms: int, once_ms: int = 0) -> target_pb2.Verdict:
    timings = common_pb2.Timings(compute_ns=compute_ms * MS, once_ns=once_ms * MS)
    return target_pb2.Verdict(step_id=step_id, base_len=9, timings=timings)


def test_what_is_spent_once_is_no_cost_of_a_round() -> None:
    """A graph captured in one round must not make the policy think that its K is dear."""
    target: Any = _Target()
    record = Record("dflash")
    steps = Steps(None, record)
    steps.open(target, target_pb2.OpenTarget(), common_pb2.SessionKey())
    sent = steps._sent_ns
    steps.account(verdict(0, 1), sent + 2 * MS, 0, 0)
    for once_ms in (0, 300):
        steps.verify(9, [1, 2, 3], 0, 0)
        begun, steps._verdict_ns = steps._sent_ns, steps._sent_ns
        steps.account(verdict(steps.step, 5, once_ms), begun + (7 + once_ms) * MS, 0, 0)
    assert target.costs == [(3, 9, False, 7)] * 2
    outside = record.to_wire(4).per_step_outside_us
    assert list(outside) == [2000, 2000]


def test_verdicts_that_arrive_together_did_not_cost_nothing() -> None:
    """Where the coordinator comes late to the verdicts of a run ahead, there is hardly any time
    between them: less than the drafter says it worked."""
    target: Any = _Target()
    steps = Steps(None, Record("dflash"))
    steps.open(target, target_pb2.OpenTarget(), common_pb2.SessionKey())
    steps.verify(9, [1, 2, 3], 1, 3, True)
    begun = steps._verdict_ns = steps._sent_ns
    steps.account(verdict(1, 5), begun + 16 * MS, 0, 0)
    steps.follow(3)
    late = verdict(2, 5)
    late.proposal.timings.compute_ns = 2 * MS
    steps.account(late, begun + 16 * MS + 40_000, 0, 0)
    assert [round(seconds * 1e3) for seconds in target.seconds] == [16, 5]
    assert target.costs == [(3, 9, False, 16), (3, 9, True, 5)]


def test_a_cost_of_nothing_is_not_believed() -> None:
    """It would stay nothing, since one time moves a mean by a factor; and K be chosen by it."""
    verify = RoundCosts([Cost(k, 1, 32, 0.01 + 0.001 * k) for k in (0, 3)])
    policy = KPolicy(verify, RoundCosts([Cost(3, 1, 32, 0.002)]), Acceptance(), 3)
    verify.note(3, 1, 40, 0.0)
    assert 0 < policy.choose(1, 3, 1, 40) <= 3
    verify.note(3, 1, 40, 0.013)
    curves = verify.curves(1, 40, 3)
    assert curves is not None and round(curves.driven[3] * 1e3) == 13


def test_the_longest_run_fits_a_mailbox_that_nobody_empties() -> None:
    """A verdict lost from it would be waited for without end."""
    mail, longest = Mailbox(), 1 + 1024
    for name in ("draft_ahead", "free_run"):
        limits = CoordinatorSettings.model_fields[name].metadata
        assert max(getattr(limit, "le", 0) for limit in limits) + 1 == longest
    for number in range(longest):
        mail.put(number)
    assert mail.take()[1] == 0  # type: ignore[index]
