"""One session's place at a drafter: opened, followed, lost, opened again there or elsewhere.

Whatever goes wrong here costs speed and is counted in the record; nothing raises into the session.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from coordinator.draft_session import end
from coordinator.drafters import COLOCATED, SEPARATE
from coordinator.offers import Choice
from coordinator.opening import Opening
from coordinator.row_format import row_format
from specwire.v1 import common_pb2

# Tries to attach again are at least this far apart.
_ATTACH_PAUSE_S = 0.3
# So often the target is opened again for a drafter that reads rows and gets them from nowhere,
# because another was lost.
_REOPENS = 2


class Attachment(Opening):
    """Where nothing is attached `reattach` looks for a drafter, between the session's steps.

    The target sends rows only where it was opened to. So it is opened again, but no sooner than the
    drafter has been, for the generation to come: its steps wait for no drafter meanwhile.
    """

    def refused(self, cause: str) -> None:
        """The target does not serve this drafter, or sends no rows to it: it is of no use to this
        session. A separate one may be, where the request leaves that open."""
        self._record.fell_back(cause)
        self._record.placement = ""
        beside = replace(self._wanted, placement=SEPARATE)
        open_to = self.colocated and not self._wanted.placement
        if open_to and self._group.offers.drafter(beside, self.target) is not None:
            self._wanted = beside
        else:
            self.give_up()

    def reattach(self, step_id: int, ids: list[int]) -> bool:
        """Called between steps while nothing is attached: opens a drafter with all committed ids,
        without waiting. True: the target must be opened again, since a drafter is the target's own,
        or needs rows, gets none, and has been opened (`ahead`)."""
        if self.given_up or self.attached:
            return False
        if self._opening:
            return self._finish_reattach(step_id, ids)
        now = asyncio.get_running_loop().time()
        if now < self._try_at:
            return False
        self._try_at = now + _ATTACH_PAUSE_S
        recalled = self.away is not None
        if recalled and not self._recalled():
            return False
        self._choose(ids, self.key)
        if self._usable(len(ids)):
            return self._begin_reattach(ids)
        if recalled:
            self.choice = None
        return False

    def _usable(self, length: int) -> bool:
        """Whether the chosen drafter may follow the session now, and is worth what that takes. A
        session that was called back, and is not worth it, is none that lost its drafter."""
        choice = self.choice
        if choice is None or not choice.worker.link.ready or choice.standing.breaker.open:
            return False
        if self._stay_away(self.key):
            return False
        if not self._opens_target(choice):
            return True
        recalled = self.away is not None
        worth = self._worth_reopening(length) and (recalled or self._reopens < _REOPENS)
        if not (worth or recalled):
            self._record.fell_back("rows_unavailable")
            self.give_up()
        return worth

    def _opens_target(self, choice: Choice) -> bool:
        if choice.placement == COLOCATED:
            return True
        # A draft service that comes back may read others than it did.
        rows = row_format(self.target.info, choice.drafter)
        sent = self._rows_at is choice.worker and self._sent == rows
        return choice.drafter.needs_rows and not sent

    def _begin_reattach(self, ids: list[int]) -> bool:
        choice = self.choice
        assert choice is not None
        if self.away is not None:
            self._pause.called_back()
        if choice.placement == COLOCATED:
            return self._reopening()
        self.ahead = self._opens_target(choice)
        if self.ahead:
            # The target goes on meanwhile, and is opened again once the drafter answers.
            self.generation += 1
            self.key = common_pb2.SessionKey()
            self.key.CopyFrom(self._target_key)
            self.key.generation = self.generation
            until_s = self._settings.draft_open_ms / 1000
            self._open_until = asyncio.get_running_loop().time() + until_s
            self._open_asked = choice.standing.breaker.clock()
        self._send_open(ids)
        return False

    def _reopening(self) -> bool:
        """One that was called back had lost nothing: that counts as no loss."""
        self._reopens += self.away is None
        self._record.fell_back("rows_elsewhere")
        return True

    def _finish_reattach(self, step_id: int, ids: list[int]) -> bool:
        choice = self.choice
        assert choice is not None
        if self.mail is None or self.mail.failed:
            self.lose("draft_lost")
            return False
        got = self.mail.take()
        if got is None:
            if self.ahead and asyncio.get_running_loop().time() > self._open_until:
                choice.standing.breaker.failure(self._open_asked)
                self.lose("open_late")
            return False
        self._take_opened(got[1])
        if not self.attached:
            return False
        if self.ahead:
            return not self._stay_away(self.key) and self._reopening()
        self.away = None
        self.grace_s = max(self.grace_s, self._settings.draft_open_ms / 1000)
        if choice.drafter.needs_rows:
            self._rows_again(step_id, ids, self.have_rows)
        return False

    def begin_ahead(self) -> common_pb2.SessionKey:
        """The target is opened for the generation that the drafter has been opened for."""
        self._target_key, self._rows_at, self.away, self.ahead = self.key, None, None, False
        self.have_rows = min(self.have_rows, self.told - 1)
        return self.key

    def lose(self, cause: str) -> None:
        super().lose(cause)
        if self.away is not None:
            self.leave()  # it was called back, and no drafter came
        elif self.ahead:
            end(self.choice, self.key)
            self.key, self.ahead = self._target_key, False

    def give_up(self) -> None:
        self.given_up = True
        self.close()

    def close(self) -> None:
        """Tells the drafter that the session is over. Safe to repeat."""
        end(self.choice, self.key)
        self.detach()
