"""One session's place at a drafter: opened, followed, lost, opened again there or elsewhere.

Whatever goes wrong here costs speed and is counted in the record; nothing raises into the session.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from coordinator.draft_session import end
from coordinator.draft_worker import DraftWorker
from coordinator.drafters import COLOCATED, SEPARATE, Wanted
from coordinator.following import Following
from coordinator.placement import Group
from coordinator.record import Record
from coordinator.target_worker import TargetWorker
from specwire.v1 import common_pb2, target_pb2

# Tries to attach again are at least this far apart.
_ATTACH_PAUSE_S = 0.3
# A drafter that reads rows and gets them from nowhere is worth opening the target again for when
# so many tokens are still to come: at least these, and at least this share of the context.
_REOPEN_TOKENS, _REOPEN_SHARE = 32, 8
_REOPENS = 2


class Attachment(Following):
    def __init__(
        self,
        group: Group,
        target: TargetWorker,
        wanted: Wanted | None,
        sampling: common_pb2.Sampling,
        k: int,
        deadline: float | None,
        record: Record,
        adaptive: bool = False,
    ) -> None:
        super().__init__(group, target, sampling, k, deadline, record, adaptive)
        self.given_up = wanted is None
        # Whether the drafter is in the target's process: it needs no opening, and sees the session.
        self.colocated = False
        # Slack for the first proposal, which takes in the whole context.
        self.grace_s = 0.0
        self._wanted = wanted or Wanted("")
        self._try_at = 0.0
        self._reopens = 0

    @property
    def attached(self) -> bool:
        """Whether the drafter follows the session."""
        return self.colocated or (self.mail is not None and not self._opening)

    @property
    def direct(self) -> bool:
        """Whether the target can ask the draft service itself, on the stream of its rows."""
        choice = self.choice
        return (
            choice is not None
            and self.mail is not None
            and not self.mail.failed
            and self._rows_at is choice.worker
            and self.target.asks_drafts
            and isinstance(choice.worker, DraftWorker)
            and choice.worker.answers_targets
        )

    # -- opening ---------------------------------------------------------------------------------

    async def open(self, key: common_pb2.SessionKey, ids: list[int], target: TargetWorker) -> None:
        """Opens a drafter that fits the target for a generation; after a bounded wait it is
        attached or not."""
        self.detach()
        before, self.key, self.target, self._rows_at = self.key, key, target, None
        self.away = None
        if self.given_up:
            return
        self._choose(ids, before)
        if self.choice is None or not self.choice.worker.link.ready:
            self._record.fell_back("draft_down")
            return
        if self.choice.placement == COLOCATED:
            self.colocated, self._record.placement = True, COLOCATED
            return
        followed = self.choice
        if self._stay_away():
            end(followed, before)
            return
        wait_ms = self._settings.draft_open_ms
        if self.choice.standing.breaker.open:
            # It may follow, so that it can be asked later, but nobody waits for it.
            wait_ms = min(wait_ms, self._settings.proposal_wait_min_ms)
        if self._send_open(ids):
            limit = asyncio.get_running_loop().time() + wait_ms / 1000
            await self._await_opened(self.capped(limit))

    def _choose(self, ids: list[int], key: common_pb2.SessionKey) -> None:
        """The best drafter that fits the target now. One that followed the session as `key` and
        fits is kept among its like; another is told that it is over."""
        before = self.choice
        worker = before.worker if before is not None else None
        self.choice = self._group.offers.drafter(self._wanted, self.target, ids, keep=worker)
        if self.choice is None or self.choice.worker is not worker:
            end(before, key)

    def push_to(self) -> target_pb2.PushTo | None:
        """Where the target sends rows; asked once the drafter is open."""
        choice = self.choice if self.attached else None
        if choice is None or self.colocated or not choice.drafter.needs_rows:
            return None
        assert isinstance(choice.worker, DraftWorker)
        self._rows_at = choice.worker
        return target_pb2.PushTo(
            address=choice.worker.push_address,
            draft_incarnation=choice.worker.link.incarnation,
            format=choice.drafter.row_format,
        )

    def beside(self, then_propose: int) -> target_pb2.ColocatedDraft | None:
        """The drafter that the target is to use in its own process, and what it proposes first."""
        if self.choice is None or not self.colocated:
            return None
        return target_pb2.ColocatedDraft(
            method=self.choice.drafter.method,
            max_draft_tokens=min(self._k, self.choice.drafter.max_draft_tokens),
            then_propose=then_propose,
        )

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

    # -- losing and attaching again --------------------------------------------------------------

    def reattach(self, step_id: int, ids: list[int], left: int) -> bool:
        """Called between steps while nothing is attached, with `left` tokens to come: opens a
        drafter with all committed ids, without waiting. True: the target must be opened again,
        since a drafter needs rows and gets none, or is the target's own."""
        if self.given_up or self.attached:
            return False
        if self._opening:
            self._finish_reattach(step_id, ids)
            return False
        now = asyncio.get_running_loop().time()
        if now < self._try_at:
            return False
        self._try_at = now + _ATTACH_PAUSE_S
        recalled = self._recalled()
        if self.away is not None and not recalled:
            return False
        self.away = None
        self._choose(ids, self.key)
        choice = self.choice
        if choice is None or not choice.worker.link.ready or choice.standing.breaker.open:
            return False
        reads = choice.drafter.needs_rows and self._rows_at is not choice.worker
        if choice.placement == COLOCATED or reads:
            return self._worth_reopening(len(ids), left, recalled)
        self._send_open(ids)
        return False

    def _worth_reopening(self, context: int, left: int, recalled: bool) -> bool:
        """`recalled`: nothing was lost, so that it counts as no loss."""
        worth = left >= _REOPEN_TOKENS and left * _REOPEN_SHARE >= context
        if not worth or (self._reopens >= _REOPENS and not recalled):
            self._record.fell_back("rows_unavailable")
            self.give_up()
            return False
        self._reopens += not recalled
        self._record.fell_back("rows_elsewhere")
        return True

    def _finish_reattach(self, step_id: int, ids: list[int]) -> None:
        if self.mail is None or self.mail.failed:
            self.lose("draft_lost")
            return
        got = self.mail.take()
        if got is None:
            return
        self._take_opened(got[1])
        if not self.attached or self.choice is None:
            return
        self.grace_s = max(self.grace_s, self._settings.draft_open_ms / 1000)
        if not self.choice.drafter.needs_rows:
            return
        self._rows_again(step_id, ids, self.have_rows)

    def give_up(self) -> None:
        self.given_up = True
        self.close()

    def detach(self) -> None:
        super().detach()
        self.colocated = False

    def close(self) -> None:
        """Tells the drafter that the session is over. Safe to repeat."""
        end(self.choice, self.key)
        self.detach()
