"""The target's half of one session's rounds: sending steps, and what fits as an answer to them."""

from __future__ import annotations

import time
from typing import Any

from coordinator.mailbox import Mailbox
from coordinator.record import Record, remaining_ms, worked_ns
from coordinator.target_worker import TargetWorker
from specwire.errors import Reason, SpecwireError
from specwire.v1 import common_pb2, target_pb2


class Steps:
    """Steps of one session, generation after generation, at whichever target it is."""

    def __init__(self, deadline: float | None, record: Record) -> None:
        self._deadline, self._record = deadline, record
        self._mail = Mailbox()
        self._target: TargetWorker | None = None
        self._key = common_pb2.SessionKey()
        # The step awaited, verdicts that still come unasked after it, and whether their steps
        # verify what the drafter beside the target proposes.
        self.step, self.unasked, self.drafts_ahead = 0, 0, False
        # Draft tokens sent with the awaited step, and when it was asked; 0: unasked.
        self._sent, self._sent_ns = 0, 0
        # When the latest verdict arrived.
        self._verdict_ns = 0

    def open(
        self, target: TargetWorker, request: target_pb2.OpenTarget, key: common_pb2.SessionKey
    ) -> None:
        """Step 0 of a generation."""
        self._target, self._key = target, key
        self._mail = target.link.open_mailbox(key)
        self.step, self.unasked, self._sent = 0, request.free_run, 0
        self.drafts_ahead = False
        self._send(target_pb2.TargetItem(open=request))

    def verify(
        self,
        base_len: int,
        draft: list[int],
        free_run: int,
        then_propose: int,
        drafts_ahead: bool = False,
        draft_wait_us: int = 0,
    ) -> None:
        """The next step, after which the target may run ahead. Its last verdict, or with
        `drafts_ahead` each, brings `then_propose` tokens of a co-located drafter."""
        self.step, self.unasked, self._sent = self.step + 1, free_run, len(draft)
        self._mail.may_wait = free_run
        self.drafts_ahead = drafts_ahead
        # Filled in place: four times as fast as building two messages with keywords.
        item = target_pb2.TargetItem()
        verify = item.verify
        verify.key.CopyFrom(self._key)
        verify.step_id, verify.base_len = self.step, base_len
        verify.draft_ids.extend(draft)
        verify.free_run, verify.then_propose = free_run, then_propose
        verify.deadline_ms, verify.drafts_ahead = remaining_ms(self._deadline), drafts_ahead
        verify.draft_wait_us = draft_wait_us
        self._send(item)

    def follow(self, drafted: int = 0) -> None:
        """The next verdict of a free run comes by itself, over `drafted` tokens."""
        self.unasked -= 1
        self.step += 1
        self._sent, self._sent_ns = drafted, 0
        self._mail.may_wait = self.unasked

    def close(self) -> None:
        """Tells the target that this generation is over. Safe to repeat."""
        if self._target is not None:
            self._target.link.close_mailbox(self._key)
            close = target_pb2.CloseSession(key=self._key)
            self._target.link.send(target_pb2.TargetItem(close=close))

    def _send(self, item: target_pb2.TargetItem) -> None:
        # A link that is down has failed the mailbox, or does so for a new one here.
        assert self._target is not None
        if not self._target.link.send(item):
            down = SpecwireError(Reason.ENGINE_DOWN, "the link to the target is down")
            self._mail.fail(down)
        self._sent_ns = time.perf_counter_ns()

    async def reply(self) -> tuple[int, Any]:
        """The next message of the target with its arrival. Raises what the link failed with, and
        DEADLINE."""
        got = await self._mail.get(self._deadline)
        if got is None:
            raise SpecwireError(Reason.DEADLINE, "the deadline has passed")
        self._record.spent("turn", self._mail.waited_ns)
        return got

    def arrived(self, base_len: int) -> tuple[int, target_pb2.Verdict] | None:
        """The awaited verdict with its arrival, if it is there already. What else may be there is
        left for `reply`."""
        message = self._mail.first
        if isinstance(message, target_pb2.Verdict) and self.fits(message, base_len):
            return self._mail.take()
        return None

    def dropped(self) -> None:
        """A message that answers no open question."""
        if self._target is not None:
            self._target.link.dropped["step"] += 1

    def fits(self, verdict: target_pb2.Verdict, base_len: int) -> bool:
        """Whether a verdict answers the awaited step, with lengths that can be."""
        count, accepted = len(verdict.tokens), verdict.accepted
        return (
            verdict.step_id == self.step
            and verdict.base_len == base_len
            and verdict.new_len == base_len + count
            and accepted <= count
            and accepted <= self._sent
        )

    def account(
        self,
        verdict: target_pb2.Verdict,
        arrived_ns: int,
        waited_ns: int,
        drafted_ns: int,
    ) -> None:
        """Where the time since the previous verdict went: `waited_ns` of it for a separate draft,
        which computed for `drafted_ns`; what one did that the target asked stands in the verdict.
        Free runs overlap with the rest."""
        record, timings, sent_ns = self._record, verdict.timings, self._sent_ns
        computed, once_ns = timings.compute_ns, timings.once_ns
        worked, inside = timings.queue_ns + computed, 0
        if verdict.HasField("proposal"):
            of_draft = verdict.proposal.timings
            inside, once_ns = worked_ns(of_draft), once_ns + of_draft.once_ns
            drafted_ns += of_draft.compute_ns
        # What is not spent again, such as the capture of a graph, is no cost of a round.
        took_ns = arrived_ns - (sent_ns or self._verdict_ns) - once_ns
        took_ns = took_ns if took_ns > 0 else 0
        if inside:
            # A drafter is not believed to have worked for longer than that.
            inside = min(inside, took_ns)
            record.spent("draft", inside)
        if sent_ns:
            record.spent("link", took_ns - worked - inside)
        if verdict.step_id == 0:
            record.spent("prefill", worked)
            record.first_ns = record.first_ns or arrived_ns
        else:
            assert self._target is not None
            beside = arrived_ns - self._verdict_ns - computed - drafted_ns - once_ns
            record.step(self._sent, verdict.accepted, beside)
            record.spent("verify", worked)
            # Verdicts of a run ahead may arrive together: none took less than its computing.
            round_ns = took_ns - inside
            if not sent_ns and round_ns < computed:
                round_ns = computed
            self._target.note_round(round_ns / 1e9)
            self._target.note_cost(self._sent, verdict.base_len, round_ns / 1e9, not sent_ns)
            if sent_ns:
                record.spent("coordinator", sent_ns - self._verdict_ns - waited_ns)
        self._verdict_ns = arrived_ns
