"""The drafter's half of one session: open, advance, propose, lose, attach again.

Whatever goes wrong here costs speed and is counted in the record; nothing here raises into the
session. What a drafter says is a hint: ids that cannot be are dropped, replies for another step or
length too.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from coordinator.links import Mailbox
from coordinator.placement import Choice, TargetWorker
from coordinator.record import Record, remaining_ms, worked_ns
from coordinator.settings import CoordinatorSettings
from specwire.errors import Reason, SpecwireError
from specwire.rpc import encode_ids
from specwire.v1 import common_pb2, draft_pb2, target_pb2

# Tries to attach again are at least this far apart.
_ATTACH_PAUSE_S = 0.3
# Rounds in a row without the rows it needs after which a re-attached drafter is given up.
_ROWLESS_ROUNDS = 3


class Drafting:
    def __init__(
        self,
        *,
        choice: Choice | None,
        sampling: common_pb2.Sampling,
        k: int,
        deadline: float | None,
        target: TargetWorker,
        settings: CoordinatorSettings,
        record: Record,
    ) -> None:
        self._choice, self._sampling, self._k, self._deadline = choice, sampling, k, deadline
        self._target, self._settings, self._record = target, settings, record
        self._key = common_pb2.SessionKey()
        self._mail: Mailbox | None = None
        self._opening = False
        # Committed ids that the drafter was told of.
        self._told = 0
        self._have_rows = 0
        self._rows_pushed = False
        self._rowless = 0
        self._given_up = choice is None
        self._try_at = 0.0
        # Slack for the first proposal, which takes in the whole context.
        self._grace_s = 0.0
        # Step, committed length, k and time of the question that waits for a proposal.
        self._asked: tuple[int, int, int, int] | None = None
        # How long this round's question kept the session waiting, at most.
        self.waited_ns = 0

    @property
    def attached(self) -> bool:
        """Whether the drafter follows the session."""
        return self._mail is not None and not self._opening

    @property
    def wanted(self) -> bool:
        """Whether speculation is meant to go on, now or later."""
        return not self._given_up

    # -- opening ---------------------------------------------------------------------------------

    async def open(self, key: common_pb2.SessionKey, ids: list[int]) -> None:
        """Opens the drafter for a generation; after a bounded wait it is attached or not."""
        self._detach()
        self._key = key
        self._rows_pushed = False
        if self._choice is None or self._given_up:
            return
        if not self._choice.worker.link.ready:
            self._record.fell_back("draft_down")
        elif self._choice.worker.breaker.open:
            self._record.fell_back("breaker_open")
        else:
            self._send_open(ids)
            limit = asyncio.get_running_loop().time() + self._settings.draft_open_ms / 1000
            await self._await_opened(self._capped(limit))

    def push_to(self) -> target_pb2.PushTo | None:
        """Where the target sends rows; asked once the drafter is open."""
        if self._choice is None or not self.attached or not self._choice.drafter.needs_rows:
            return None
        self._rows_pushed = True
        return target_pb2.PushTo(
            address=self._choice.worker.push_address,
            draft_incarnation=self._choice.worker.link.incarnation,
            format=self._choice.drafter.row_format,
        )

    @property
    def rows_from(self) -> int:
        return self._have_rows

    def refuse_rows(self, cause: str) -> None:
        """The target does not send rows to this drafter: it is of no use to this session."""
        self._record.fell_back(cause)
        self._given_up = True
        self.close()

    def _send_open(self, ids: list[int]) -> None:
        assert self._choice is not None
        worker, model = self._choice.worker, self._target.info
        self._mail = worker.link.open_mailbox(self._key)
        self._opening, self._told, self._asked = True, len(ids), None
        item = draft_pb2.OpenDraft(
            key=self._key,
            method=self._choice.drafter.method,
            ids=encode_ids(ids),
            sampling=self._sampling,
            max_draft_tokens=self._k,
            lease_ms=self._settings.lease_ms,
            target_incarnation=self._target.link.incarnation,
            target_fingerprint=model.model.fingerprint if model is not None else "",
            deadline_ms=remaining_ms(self._deadline),
        )
        if not worker.link.send(draft_pb2.DraftItem(open=item)):
            self._lose("draft_down")

    async def _await_opened(self, until: float) -> None:
        while self._opening and self._mail is not None:
            try:
                got = await self._mail.get(until)
            except SpecwireError:
                self._lose("draft_lost")
                return
            if got is None:
                self._failed_late("open_late")
                self._lose("")
                return
            self._take_opened(got[1])

    def _take_opened(self, message: Any) -> None:
        if isinstance(message, draft_pb2.DraftOpened):
            self._opening = False
            self._have_rows = min(message.have_rows, self._told)
        elif isinstance(message, draft_pb2.DraftRefused):
            self._lose(message.error.reason.lower() or "refused")
        else:
            self._dropped("step")

    # -- one round -------------------------------------------------------------------------------

    def k_limit(self, length: int) -> int:
        """Most tokens worth asking for at this committed length."""
        if self._choice is None or not self.attached:
            return 0
        drafter = self._choice.drafter
        if drafter.max_length_tokens and length + self._k > drafter.max_length_tokens:
            self._record.fell_back("draft_length")
            return 0
        return min(self._k, drafter.max_draft_tokens)

    def first_context(self, prefill_s: float) -> None:
        """How long the target took for the context that the drafter is taking in now."""
        self._grace_s = prefill_s

    def advance(self, verdict: target_pb2.Verdict, ids: list[int], k: int) -> None:
        """Tells the drafter what was committed and asks for `k` tokens; 0: stay current only."""
        self._asked, self.waited_ns = None, 0
        if self._choice is None or self._mail is None or self._opening:
            return
        if self._mail.failed:
            self._lose("draft_lost")
            return
        if k and not self._choice.worker.breaker.allows():
            self._record.fell_back("breaker_open")
            k = 0
        sent = self._send_advance(verdict.step_id, ids, k, verdict.rows_start, verdict.rows_count)
        if sent and k:
            self._asked = (verdict.step_id, len(ids), k, time.perf_counter_ns())

    def _send_advance(
        self, step_id: int, ids: list[int], k: int, rows_start: int, rows_count: int
    ) -> bool:
        assert self._choice is not None
        item = draft_pb2.Advance(
            key=self._key,
            step_id=step_id,
            base_len=self._told,
            tokens=ids[self._told :],
            k=k,
            deadline_ms=max(1, int(self._budget_s() * 1000)) if k else 0,
            rows_start=rows_start,
            rows_count=rows_count,
        )
        if not self._choice.worker.link.send(draft_pb2.DraftItem(advance=item)):
            self._lose("draft_lost")
            return False
        self._told = len(ids)
        return True

    def _budget_s(self) -> float:
        """A share of a step: waiting longer costs more than the proposal can bring."""
        step_s = max(self._target.step_s or 0.0, self._grace_s)
        share = self._settings.proposal_wait_share * step_s
        return max(share, self._settings.proposal_wait_min_ms / 1000)

    def _capped(self, limit: float) -> float:
        return limit if self._deadline is None else min(limit, self._deadline)

    async def proposal(self) -> list[int]:
        """The drafter's tokens for what the last `advance` asked; none when they are late."""
        if self._asked is None or self._choice is None or self._mail is None:
            return []
        step_id, length, k, sent_ns = self._asked
        elapsed_s = (time.perf_counter_ns() - sent_ns) / 1e9
        limit = self._capped(asyncio.get_running_loop().time() + self._budget_s() - elapsed_s)
        ids: list[int] = []
        try:
            while (got := await self._mail.get(limit)) is not None:
                if (found := self._read(got[1], step_id, length, k)) is not None:
                    ids = found
                    self._spent(got[0] - sent_ns, got[1])
                    break
            else:
                self._failed_late("late")
                self.waited_ns = time.perf_counter_ns() - sent_ns
                self._record.spent("draft", self.waited_ns)
        except SpecwireError:
            self._lose("draft_lost")
        self._asked, self._grace_s = None, 0.0
        return ids

    def _spent(self, wall_ns: int, message: Any) -> None:
        self.waited_ns = wall_ns
        worked = worked_ns(message.timings) if isinstance(message, draft_pb2.Proposal) else 0
        self._record.spent("draft", min(worked, wall_ns))
        self._record.spent("link", wall_ns - worked)

    def _read(self, message: Any, step_id: int, length: int, k: int) -> list[int] | None:
        """Usable tokens of a reply to this round's question; None for a reply to anything else."""
        if isinstance(message, draft_pb2.DraftRefused) and message.step_id == step_id:
            self._refused(message)
            return []
        if not isinstance(message, draft_pb2.Proposal) or message.step_id != step_id:
            self._dropped("step")
            return None
        if message.base_len != length:
            self._dropped("length")
            return None
        assert self._choice is not None
        self._choice.worker.breaker.success()
        ids = self._usable(message.ids, k)
        if not ids:
            cause = message.reason or "no_proposal"
            self._record.fell_back(cause)
            self._rowless = self._rowless + 1 if cause == "rows_missing" else 0
            if self._rowless >= _ROWLESS_ROUNDS:
                self._give_up()
        else:
            self._rowless = 0
        return ids

    def _usable(self, proposed: Any, k: int) -> list[int]:
        """At most k ids, up to the first that the target's vocabulary does not have."""
        vocab = self._target.info.model.vocab_size if self._target.info is not None else 0
        ids: list[int] = []
        for token in proposed[:k]:
            if token >= vocab:
                self._dropped("vocab_range")
                break
            ids.append(token)
        if len(proposed) > k:
            self._dropped("too_many")
        return ids

    def _refused(self, message: draft_pb2.DraftRefused) -> None:
        reason = message.error.reason
        self._record.fell_back(reason.lower() or "refused")
        if reason == Reason.NEED_TOKENS and 0 < message.have_len <= self._told:
            # The next Advance starts there.
            self._told = message.have_len
        else:
            self._detach()

    # -- losing and attaching again --------------------------------------------------------------

    def reattach(self, step_id: int, ids: list[int]) -> None:
        """Called between steps: opens the drafter again with all committed ids, without waiting."""
        if self._choice is None or self._given_up or self.attached:
            return
        if self._opening:
            self._finish_reattach(step_id, ids)
            return
        worker, now = self._choice.worker, asyncio.get_running_loop().time()
        if not worker.link.ready or now < self._try_at or worker.breaker.open:
            return
        if self._choice.drafter.needs_rows and not self._rows_pushed:
            self._record.fell_back("rows_unavailable")
            self._give_up()
            return
        self._try_at = now + _ATTACH_PAUSE_S
        self._send_open(ids)

    def _finish_reattach(self, step_id: int, ids: list[int]) -> None:
        if self._mail is None or self._mail.failed:
            self._lose("draft_lost")
            return
        got = self._mail.take()
        if got is None:
            return
        self._take_opened(got[1])
        if not self.attached or self._choice is None:
            return
        self._grace_s = max(self._grace_s, self._settings.draft_open_ms / 1000)
        if not self._choice.drafter.needs_rows:
            return
        export = target_pb2.ExportRows(key=self._key)
        setattr(export, "from", self._have_rows)  # a keyword of Python
        self._target.link.send(target_pb2.TargetItem(export_rows=export))
        # The step that ended last confirms the rows sent again.
        self._send_advance(step_id, ids, 0, self._have_rows, len(ids) - 1 - self._have_rows)

    def _failed_late(self, cause: str) -> None:
        self._record.fell_back(cause)
        if self._choice is not None:
            self._choice.worker.breaker.failure()

    def _lose(self, cause: str) -> None:
        if cause:
            self._record.fell_back(cause)
        self._detach()

    def _give_up(self) -> None:
        self._given_up = True
        self.close()

    def _detach(self) -> None:
        if self._mail is not None and self._choice is not None:
            self._choice.worker.link.close_mailbox(self._key)
        self._mail, self._opening, self._asked = None, False, None

    def close(self) -> None:
        """Tells the drafter that the session is over. Safe to repeat."""
        if self._choice is not None and self._key.generation:
            close = target_pb2.CloseSession(key=self._key)
            self._choice.worker.link.send(draft_pb2.DraftItem(close=close))
        self._detach()

    def _dropped(self, cause: str) -> None:
        if self._choice is not None:
            self._choice.worker.link.dropped[cause] += 1
