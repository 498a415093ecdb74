"""A session's drafter as it is opened beside the target, generation by generation."""

from __future__ import annotations

import asyncio

from coordinator.draft_session import end
from coordinator.draft_worker import DraftWorker
from coordinator.drafters import COLOCATED, Wanted
from coordinator.following import Following
from coordinator.placement import Group
from coordinator.record import Record
from coordinator.target_worker import TargetWorker
from specwire.v1 import common_pb2, target_pb2


class Opening(Following):
    """Which drafter a session has now, if any, and where it is."""

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
        ends_at: int = 0,
    ) -> None:
        super().__init__(group, target, sampling, k, deadline, record, adaptive, ends_at)
        self.given_up = wanted is None
        # Of the rows that the target was opened to send.
        self._sent = common_pb2.RowFormat()
        # Whether the drafter is in the target's process: it needs no opening, and sees the session.
        self.colocated = False
        # Slack for the first proposal, which takes in the whole context.
        self.grace_s = 0.0
        self._wanted = wanted or Wanted("")
        # The highest generation that any worker has heard of.
        self.generation = 0
        # When somebody looks for a drafter again, and how often one was lost that read rows.
        self._try_at, self._reopens = 0.0, 0
        # Of an open `ahead`: until which loop time it is waited for, and when it was asked for by
        # the breaker's clock.
        self._open_until = self._open_asked = 0.0

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

    async def open(self, key: common_pb2.SessionKey, ids: list[int], target: TargetWorker) -> None:
        """Opens a drafter that fits the target for a generation; after a bounded wait it is
        attached or not."""
        self.detach()
        before, self.key, self.target, self._rows_at = self.key, key, target, None
        self._target_key, self.generation = key, key.generation
        self.away, self.ahead = None, False
        if self.given_up:
            return
        self._choose(ids, before)
        if self.choice is None or not self.choice.worker.link.ready:
            self._record.fell_back("draft_down")
            return
        if self.choice.placement == COLOCATED:
            self.colocated, self._record.placement = True, COLOCATED
            return
        if self._stay_away(before):
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
        self._rows_at, self._sent = choice.worker, self.rows
        return target_pb2.PushTo(
            address=choice.worker.push_address,
            draft_incarnation=choice.worker.link.incarnation,
            format=self.rows,
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

    def detach(self) -> None:
        super().detach()
        self.colocated = False
