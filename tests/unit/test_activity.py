"""The log's lines about the load."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.activity import Activity
from coordinator.record import Record


@dataclass(eq=False)
class Fake:
    emitted: int = 0
    record: Record = field(default_factory=lambda: Record("dflash"))

    def round(self, drafted: int, accepted: int) -> None:
        self.record.step(drafted, accepted, 0)
        self.emitted += accepted + 1


def test_a_line_counts_what_was_done_since_the_last_one() -> None:
    activity, first, second = Activity(), Fake(), Fake()
    assert activity.line() == "", "nothing was done"
    activity.began(first)
    first.round(4, 3)
    first.round(4, 1)
    line = activity.line()
    assert line.startswith("1 running, 0 answered, ") and "ended otherwise" not in line
    assert "3.00 tokens a round, 50% of 8 draft tokens accepted" in line
    assert activity.line() == "", "an idle session is nothing that was done"
    activity.began(second)
    first.round(4, 0)
    activity.ended(first, well=True)
    activity.ended(second, well=False)
    line = activity.line()
    assert line.startswith("0 running, 1 answered, 1 ended otherwise, ")
    assert "1.00 tokens a round, 0% of 4 draft tokens accepted" in line, "none counts twice"
    assert activity.line() == ""


def test_plain_answers_say_nothing_of_drafts() -> None:
    activity, plain = Activity(), Fake()
    activity.began(plain)
    plain.round(0, 0)
    assert "draft" not in activity.line()
