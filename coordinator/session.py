"""One session's loop: the only place that knows how a round goes, the same for every method.

    advance -> (text goes out) -> proposal -> verify -> verdict -> advance ...

Without a drafter K is 0, and the target runs ahead by `free_run` steps. The draft decides nothing:
late, lost or wrong, it costs speed only. A target that is lost is opened once more with the
committed ids; noise is keyed by position, so the text goes on as it would have.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from coordinator.answer import Answer, AnswerSpec
from coordinator.drafting import Drafting
from coordinator.links import Mailbox
from coordinator.placement import PLAIN, Choice, Fleet
from coordinator.record import Record, remaining_ms, worked_ns
from coordinator.text import TextModel
from specwire.errors import Reason, SpecwireError, from_item
from specwire.rpc import encode_ids
from specwire.v1 import common_pb2, generate_pb2, target_pb2

log = logging.getLogger(__name__)

Deliver = Callable[[generate_pb2.Delta], Awaitable[None]]
# Refusals of rows: the request itself is fine, the drafter is of no use to it.
_ROW_REFUSALS = (Reason.PUSH_ADDRESS_REFUSED, Reason.ROWS_REFUSED)
# The target lost the session (restart, lease, link): opening it again helps.
_LOST = (Reason.ENGINE_DOWN, Reason.SESSION_UNKNOWN, Reason.NEED_TOKENS)


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """A validated request. `deadline` is a time of the event loop's clock."""

    prompt: tuple[int, ...]
    answer: AnswerSpec
    choice: Choice | None
    k: int
    deadline: float | None
    # How many answers were asked for; this is one of them.
    n: int = 1
    traceparent: str = ""


class Session:
    def __init__(
        self,
        fleet: Fleet,
        session_id: int,
        spec: SessionSpec,
        text: TextModel,
        parent: Session | None = None,
    ) -> None:
        """`parent`: the session of another answer to the same prompt, opened before this one."""
        self.spec, self._parent = spec, parent
        # Set once the target was told of the session, or never will be.
        self.opened = asyncio.Event()
        method = spec.choice.drafter.method if spec.choice is not None else PLAIN
        self.record = Record(method)
        self._fleet, self._target, self._settings = fleet, fleet.target, fleet.settings
        self.session_id, self._generation = session_id, 0
        self._ids = list(spec.prompt)
        self._answer = Answer(spec.answer, text)
        self._drafting = Drafting(
            choice=spec.choice,
            sampling=spec.answer.sampling,
            k=spec.k,
            deadline=spec.deadline,
            target=self._target,
            settings=self._settings,
            record=self.record,
        )
        self._mail = Mailbox()
        self._closed = False
        self._reopened = False
        # The step awaited, the draft tokens sent with it, and when it was asked; 0: unasked.
        self._step, self._sent, self._sent_ns = 0, 0, 0
        # Verdicts that still come unasked after the awaited one.
        self._unasked = 0
        # When the latest verdict arrived.
        self._verdict_ns = 0

    @property
    def emitted(self) -> int:
        return len(self._ids) - len(self.spec.prompt)

    async def run(self, deliver: Deliver) -> generate_pb2.Finished:
        """Runs the session to its end. Whatever happens, both workers are told to close."""
        try:
            await self._open()
            while True:
                verdict = await self._verdict()
                done = verdict.finish != common_pb2.FINISH_REASON_UNSPECIFIED
                k = 0 if done else self._ask(verdict)
                if k:
                    await asyncio.sleep(0)  # the question leaves before the text is worked on
                delta = self._answer.add(verdict, done)
                self._ids.extend(verdict.tokens)
                done = done or bool(self._answer.stop)
                if done:
                    self.close()
                if delta.text or delta.token_ids or delta.margins or delta.logprobs:
                    await deliver(delta)
                if done:
                    acceptance = self.record.to_wire(self._answer.tokens)
                    return self._answer.finished(verdict, len(self.spec.prompt), acceptance)
                if self._unasked:
                    self._follow()
                else:
                    self._verify(await self._drafting.proposal() if k else [])
        finally:
            self.opened.set()
            self.close()

    def close(self) -> None:
        """Tells both workers that the session is over. Synchronous, and safe to repeat."""
        if self._closed:
            return
        self._closed = True
        self._drafting.close()
        self._close_target()

    # -- open ------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Draft first, target second: rows must find their session."""
        self._generation += 1
        await self._drafting.open(self.key, self._ids)
        if self._parent is not None:
            await self._parent.opened.wait()
        self._open_target()
        self.opened.set()

    def _open_target(self) -> None:
        self._mail = self._target.link.open_mailbox(self.key)
        push_to = self._drafting.push_to()
        free_run = 0 if self._drafting.attached else self._settings.free_run
        self._unasked, self._step, self._sent = free_run, 0, 0
        # What belongs to the prompt is asked for until the first tokens have come.
        spec, begun = self.spec.answer, self.emitted > 0
        shares = self._parent is not None and not (begun or self._parent._closed)
        request = target_pb2.OpenTarget(
            key=self.key,
            ids=encode_ids(self._ids),
            prompt_len=len(self.spec.prompt),
            sampling=spec.sampling,
            stop_token_ids=spec.stop_token_ids,
            ignore_eos=spec.ignore_eos,
            max_new_tokens=spec.max_tokens - self.emitted,
            exactness=spec.exactness,
            push_to=push_to,
            rows_from=self._drafting.rows_from if push_to is not None else 0,
            lease_ms=self._settings.lease_ms,
            deadline_ms=remaining_ms(self.spec.deadline),
            traceparent=self.spec.traceparent,
            report_margins=spec.margins,
            free_run=free_run,
            fork_of=self._parent.key if self._parent is not None and shares else None,
            priority=spec.priority,
            logprobs=spec.logprobs,
            prompt_logprobs=None if begun else spec.prompt_logprobs,
        )
        self._send(target_pb2.TargetItem(open=request))

    async def _reopen(self, error: SpecwireError) -> None:
        """Once per session: the same model, back in time, goes on from the committed ids."""
        identity = self._target.identity
        if self._reopened:
            raise self._gone(error)
        self._reopened = True
        self.record.fell_back("target_lost")
        self._close_target()
        wait_s = self._settings.target_return_ms / 1000
        if self.spec.deadline is not None:
            wait_s = min(wait_s, self.spec.deadline - asyncio.get_running_loop().time())
        if not await self._target.link.wait_ready(wait_s):
            raise self._gone(error)
        if self._target.identity != identity:
            raise self._gone(error)
        await self._open()

    def _gone(self, error: SpecwireError) -> SpecwireError:
        text = f"the target was lost after {self.emitted} tokens: {error.message}"
        return SpecwireError(Reason.ENGINE_DOWN, text, {"tokens": str(self.emitted)})

    # -- rounds ----------------------------------------------------------------------------------

    def _ask(self, verdict: target_pb2.Verdict) -> int:
        """Tells the draft what was committed, and how many tokens the next step can use."""
        ids = [*self._ids, *verdict.tokens]
        if verdict.step_id == 0:
            self._drafting.first_context(worked_ns(verdict.timings) / 1e9)
        k = 0 if self._unasked else self._k(len(ids))
        self._drafting.advance(verdict, ids, k)
        return k

    def _k(self, length: int) -> int:
        """Draft tokens of the next step; one of the tokens still allowed is the target's own."""
        info = self._target.info
        if info is None:
            return 0
        remaining = self.spec.answer.max_tokens - (length - len(self.spec.prompt))
        room = info.model.max_length_tokens - length
        limits = (remaining - 1, room, info.max_draft_tokens, self._drafting.k_limit(length))
        return max(0, min(limits))

    def _verify(self, draft: list[int]) -> None:
        """Sends the next step. Without an attached drafter the target may run ahead."""
        if not self._drafting.attached:
            self._drafting.reattach(self._step, self._ids)
        # While a drafter is expected back the runs are short, so that it is noticed.
        window = self._settings.free_run
        window = min(window, 8) if self._drafting.wanted else window
        self._unasked = 0 if self._drafting.attached else window
        self._step += 1
        self._sent = len(draft)
        request = target_pb2.Verify(
            key=self.key,
            step_id=self._step,
            base_len=len(self._ids),
            draft_ids=draft,
            free_run=self._unasked,
            deadline_ms=remaining_ms(self.spec.deadline),
        )
        self._send(target_pb2.TargetItem(verify=request))

    def _follow(self) -> None:
        """The next verdict of a free run comes by itself."""
        self._unasked -= 1
        self._step += 1
        self._sent, self._sent_ns = 0, 0

    def _send(self, item: target_pb2.TargetItem) -> None:
        # A link that is down has failed the mailbox, or does so for a new one here.
        if not self._target.link.send(item):
            down = SpecwireError(Reason.ENGINE_DOWN, "the link to the target is down")
            self._mail.fail(down)
        self._sent_ns = time.perf_counter_ns()

    async def _verdict(self) -> target_pb2.Verdict:
        """The verdict of the awaited step; anything else is dropped and counted."""
        while True:
            try:
                got = await self._mail.get(self.spec.deadline)
            except SpecwireError as error:
                if error.reason not in _LOST:
                    raise
                await self._reopen(error)
                continue
            if got is None:
                raise SpecwireError(Reason.DEADLINE, f"deadline passed after {self.emitted} tokens")
            arrived_ns, message = got
            if isinstance(message, target_pb2.TargetRefused):
                await self._refused(message)
            elif isinstance(message, target_pb2.Verdict) and self._fits(message):
                self._account(message, arrived_ns)
                return message
            else:
                self._target.link.dropped["step"] += 1

    def _fits(self, verdict: target_pb2.Verdict) -> bool:
        """Whether a verdict answers the awaited step, with lengths that can be."""
        base = len(self._ids)
        return (
            verdict.step_id == self._step
            and verdict.base_len == base
            and verdict.new_len == base + len(verdict.tokens)
            and verdict.accepted <= min(self._sent, len(verdict.tokens))
        )

    async def _refused(self, message: target_pb2.TargetRefused) -> None:
        if message.step_id != self._step:
            self._target.link.dropped["step"] += 1
            return
        error = from_item(message.error)
        if error.reason in _ROW_REFUSALS and self._step == 0:
            self._drafting.refuse_rows(error.reason.lower())
            self._close_target()
            await self._open()
        elif error.reason in _LOST:
            await self._reopen(error)
        else:
            raise error

    def _account(self, verdict: target_pb2.Verdict, arrived_ns: int) -> None:
        """Where the time since the previous verdict went; free runs overlap with the rest."""
        worked = worked_ns(verdict.timings)
        if verdict.step_id == 0:
            self.record.spent("prefill", worked)
            self.record.spent("link", arrived_ns - self._sent_ns - worked)
            self.record.first_ns = self.record.first_ns or arrived_ns
        else:
            self.record.step(self._sent, verdict.accepted)
            self.record.spent("verify", worked)
            self._target.note_step(verdict.timings.compute_ns / 1e9)
            if self._sent_ns:
                self.record.spent("link", arrived_ns - self._sent_ns - worked)
                waited = self._drafting.waited_ns
                self.record.spent("coordinator", self._sent_ns - self._verdict_ns - waited)
        self._verdict_ns = arrived_ns

    # -- small things ----------------------------------------------------------------------------

    @property
    def key(self) -> common_pb2.SessionKey:
        return common_pb2.SessionKey(
            coordinator=self._fleet.incarnation,
            session_id=self.session_id,
            generation=self._generation,
        )

    def _close_target(self) -> None:
        self._target.link.close_mailbox(self.key)
        self._target.link.send(target_pb2.TargetItem(close=target_pb2.CloseSession(key=self.key)))
