"""Whether a draft service follows a session at all, which costs, and brings nothing where drafting
is off; and the rows that it misses.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from coordinator.draft_session import DraftSession, end
from coordinator.drafters import SEPARATE
from coordinator.offers import Choice
from coordinator.placement import Group
from coordinator.record import Record
from coordinator.target_worker import TargetWorker
from coordinator.trials import BACK_S
from coordinator.yields import Yields
from specwire.v1 import common_pb2, target_pb2

# No session has a row at such a position: none is wanted any more.
_NO_ROWS = 2**32 - 1
# How much longer a session stays away with each time that it was called back, and at most.
_GROWTH, _LONGEST_S = 4.0, 60.0
# To be followed again costs the whole context where rows are read: it is worth that when so many
# tokens are still to come, at least these, and at least this share of the context.
_REOPEN_TOKENS, _REOPEN_SHARE = 32, 8


@dataclass(slots=True)
class Pause:
    """How long one session stays away from a drafter that it has left: longer each time, since a
    load that swings would have its context computed again and again. Seconds of one clock."""

    seconds: float = BACK_S
    until: float = 0.0

    def left(self, now: float) -> None:
        self.until = now + self.seconds

    def called_back(self) -> None:
        self.seconds = min(_GROWTH * self.seconds, _LONGEST_S)


class Following(DraftSession):
    """A session is `away` from the drafter that it would have while that is not to follow it: the
    target sends no rows, and the draft service does not know the session.

    Only one whose K is chosen may be: `adaptive`. What all yield decides (`yields.py`): for a
    session that opens, and for one that is about to draft nothing. It stays away until a drafter
    has been opened for it again.
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
        ends_at: int,
    ) -> None:
        """`ends_at`: the length, in tokens, at which the session ends at the latest."""
        super().__init__(group, target, sampling, k, deadline, record)
        self.away: Choice | None = None
        self._adaptive, self._ends_at, self._pause = adaptive, ends_at, Pause()
        # The key that the target has the session by; and whether the drafter is open, or is being
        # opened, for a generation that the target has not begun.
        self._target_key, self.ahead = self.key, False
        # The draft that the target sends this generation's rows to.
        self._rows_at: object = None

    def yields_with(self, choice: Choice) -> Yields:
        """Where it is judged what all sessions of the target yield with this drafter."""
        return self.target.yields(choice.drafter.method, choice.placement)

    def _stay_away(self, key: common_pb2.SessionKey) -> bool:
        """Whether the chosen drafter is not to follow the session, which it may know as `key`."""
        choice = self.choice
        if choice is None or not self._adaptive or choice.placement != SEPARATE:
            return False
        if self.yields_with(choice).follows(self.target.busy):
            return False
        self._part(key)
        return True

    def leave(self) -> None:
        """The drafter does not follow the session any more."""
        self._part(self.key)

    def _part(self, key: common_pb2.SessionKey) -> None:
        choice = self.choice
        assert choice is not None
        # A link that loses this loses the session: it is opened again, and without rows.
        if self._rows_at is not None:
            self._ask_rows(_NO_ROWS)
        end(choice, key)
        self.detach()
        self.away, self.choice, self._rows_at = choice, None, None
        self.key, self.ahead = self._target_key, False
        self._pause.left(time.perf_counter())

    def _worth_reopening(self, length: int) -> bool:
        left = self._ends_at - length
        return left >= _REOPEN_TOKENS and left * _REOPEN_SHARE >= length

    def _recalled(self) -> bool:
        """Whether the drafter is to follow the session again, in the middle of its text."""
        away, now = self.away, time.perf_counter()
        if away is None or now < self._pause.until:
            return False
        return self.yields_with(away).recalls(self.target.busy, now)

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
        export = target_pb2.ExportRows(key=self._target_key)
        setattr(export, "from", begin)  # a keyword of Python
        self.target.link.send(target_pb2.TargetItem(export_rows=export))
