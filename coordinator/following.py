"""Whether a draft service follows a session at all, which costs, and brings nothing where drafting
is off; and the rows that it misses.
"""

from __future__ import annotations

import time

from coordinator.draft_session import DraftSession, end
from coordinator.draft_worker import DraftWorker
from coordinator.drafters import SEPARATE
from coordinator.offers import Choice
from coordinator.placement import Group
from coordinator.record import Record
from coordinator.target_worker import TargetWorker
from coordinator.yields import Yields
from specwire.v1 import common_pb2, target_pb2

# No session has a row at such a position: none is wanted any more.
_NO_ROWS = 2**32 - 1


class Following(DraftSession):
    """A session is `away` from the drafter that it would have while that is not to follow it: the
    target sends no rows, and the draft service does not know the session.

    Only one whose K is chosen may be: `adaptive`. What all yield decides (`yields.py`): for a
    session that opens, and for one that is about to draft nothing.
    """

    def __init__(
        self,
        group: Group,
        target: TargetWorker,
        sampling: common_pb2.Sampling,
        k: int,
        deadline: float | None,
        record: Record,
        adaptive: bool,
    ) -> None:
        super().__init__(group, target, sampling, k, deadline, record)
        self.away: Choice | None = None
        self._adaptive = adaptive
        # The draft that the target sends this generation's rows to.
        self._rows_at: object = None

    def yields_with(self, choice: Choice) -> Yields:
        """Where it is judged what all sessions of the target yield with this drafter."""
        return self.target.yields(choice.drafter.method, choice.placement)

    def _stay_away(self) -> bool:
        """Whether the chosen drafter, which is not open yet, is not to follow this generation."""
        choice = self.choice
        if choice is None or not self._adaptive or choice.placement != SEPARATE:
            return False
        if self.yields_with(choice).follows(self.target.busy):
            return False
        self.away, self.choice = choice, None
        return True

    def leave(self) -> None:
        """The drafter does not follow the session any more."""
        choice = self.choice
        assert choice is not None and isinstance(choice.worker, DraftWorker)
        if choice.drafter.needs_rows and self._rows_at is choice.worker:
            self._ask_rows(_NO_ROWS)
        end(choice, self.key)
        self.detach()
        self.away, self.choice, self._rows_at = choice, None, None

    def _recalled(self) -> bool:
        """Whether the drafter is to follow the session again, in the middle of its text."""
        away = self.away
        if away is None:
            return False
        return self.yields_with(away).recalls(self.target.busy, time.perf_counter())

    def mend(self, have_len: int, step_id: int, ids: list[int]) -> None:
        """A drafter that misses tokens of `ids` is told of them, and given their rows."""
        assert self.choice is not None
        self.told = have_len
        if self.choice.drafter.needs_rows:
            self._rows_again(step_id, ids, have_len - 1)

    def _rows_again(self, step_id: int, ids: list[int], begin: int) -> None:
        """The rows from `begin` on; the step that ended last confirms them."""
        self._ask_rows(begin)
        self.advance(step_id, ids, 0, 0, begin, len(ids) - 1 - begin)

    def _ask_rows(self, begin: int) -> None:
        export = target_pb2.ExportRows(key=self.key)
        setattr(export, "from", begin)  # a keyword of Python
        self.target.link.send(target_pb2.TargetItem(export_rows=export))
