"""Where the time of a round goes, as the coordinator accounts for it."""

from __future__ import annotations

from typing import Any

from coordinator.record import Record
from coordinator.steps import Steps
from specwire.v1 import common_pb2, target_pb2

MS = 1_000_000


class _Target:
    """Keeps what it is told of rounds."""

    def __init__(self) -> None:
        self.rounds: list[tuple[int, int, float]] = []
        self.link: Any = self

    def open_mailbox(self, key: Any) -> Any:
        return None

    def send(self, item: Any) -> bool:
        return True

    def note_round(self, drafted: int, length: int, seconds: float) -> None:
        self.rounds.append((drafted, length, seconds))


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
    assert [(k, length) for k, length, _ in target.rounds] == [(3, 9), (3, 9)]
    assert [round(seconds * 1e3) for _, _, seconds in target.rounds] == [7, 7]
    outside = record.to_wire(4).per_step_outside_us
    assert list(outside) == [2000, 2000]
