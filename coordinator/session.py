"""One session's loop: the only place that knows how a round goes, the same for every method.

    advance -> (text goes out) -> proposal -> verify -> verdict -> advance ...

Without a drafter K is 0, and the target runs ahead by `free_run` steps. The draft decides nothing:
late, lost or wrong, it costs speed only. A target that is lost is opened once more with the
committed ids; noise is keyed by position, so the text goes on as it would have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from coordinator.answer import Answer
from coordinator.drafting import Drafting
from coordinator.place import Place
from coordinator.placement import PLAIN, Group
from coordinator.record import Record, worked_ns
from coordinator.spec import SessionSpec, open_target
from coordinator.steps import Steps
from coordinator.text import TextModel
from coordinator.workers import TargetWorker
from specwire.errors import Reason, SpecwireError, from_item
from specwire.v1 import common_pb2, generate_pb2, target_pb2

log = logging.getLogger(__name__)

Deliver = Callable[[generate_pb2.Delta], Awaitable[None]]
# Refusals of rows: the request itself is fine, the drafter is of no use to it.
_ROW_REFUSALS = (Reason.PUSH_ADDRESS_REFUSED, Reason.ROWS_REFUSED)
# The target lost the session (restart, lease, link): opening it again helps.
_LOST = (Reason.ENGINE_DOWN, Reason.SESSION_UNKNOWN, Reason.NEED_TOKENS)
# The target takes no session now; another one may.
_ELSEWHERE = (Reason.DRAINING, Reason.QUEUE_FULL, Reason.KV_PAGES_EXHAUSTED)


class Session:
    def __init__(
        self,
        group: Group,
        session_id: int,
        spec: SessionSpec,
        text: TextModel,
        parent: Session | None = None,
    ) -> None:
        """`parent`: the session of another answer to the same prompt, opened before this one; this
        one begins at its target."""
        self.spec, self._parent = spec, parent
        # Set once other answers can begin with what this one has: the target was told of it, and
        # a drafter that reads rows has taken in those of the prompt; or never will be.
        self.shareable = asyncio.Event()
        method = spec.choice.drafter.method if spec.choice is not None else PLAIN
        self.record = Record(method)
        self._group, self._settings = group, group.settings
        answer, beside = spec.answer, parent.target if parent is not None else None
        self._place = Place(group, spec.prompt, answer.max_tokens, answer.exactness, beside)
        self.session_id = session_id
        self.key = self._key(0)
        self._ids = list(spec.prompt)
        self._answer = Answer(spec.answer, text)
        self._drafting = Drafting(
            group=group,
            target=self.target,
            method="" if spec.choice is None else method,
            sampling=spec.answer.sampling,
            k=spec.k,
            adaptive=spec.adaptive_k,
            deadline=spec.deadline,
            record=self.record,
        )
        self._steps = Steps(spec.deadline, self.record)
        self._closed = False

    @property
    def target(self) -> TargetWorker:
        """Where the session runs now."""
        return self._place.target

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
                self._ids.extend(verdict.tokens)
                k = 0 if done else self._ask(verdict)
                if k:
                    await asyncio.sleep(0)  # the question leaves before the text is worked on
                delta = self._answer.add(verdict, done)
                done = done or bool(self._answer.stop)
                if done:
                    self.close()
                if delta.text or delta.token_ids or delta.margins or delta.logprobs:
                    await deliver(delta)
                if done:
                    acceptance = self.record.to_wire(self._answer.tokens)
                    return self._answer.finished(verdict, len(self.spec.prompt), acceptance)
                if self._steps.unasked:
                    self._steps.follow()
                else:
                    draft = await self._drafting.proposal() if k else []
                    self.shareable.set()
                    await self._next(draft)
        finally:
            self.shareable.set()
            self.close()

    def close(self) -> None:
        """Tells both workers that the session is over. Synchronous, and safe to repeat."""
        if self._closed:
            return
        self._closed = True
        self._drafting.close()
        self._steps.close()
        self._place.leave(self._ids)

    # -- open ------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Draft first, target second: rows must find their session."""
        if self._parent is not None:
            await self._parent.shareable.wait()
        self.key = self._key(self.key.generation + 1)
        await self._drafting.open(self.key, self._ids, self.target)
        push_to = self._drafting.push_to()
        self._open_target(push_to)
        if push_to is None:
            self.shareable.set()

    def _open_target(self, push_to: target_pb2.PushTo | None) -> None:
        parent = self._parent
        # A prompt is shared before the first token, with a session that is still there.
        shares = (
            parent is not None
            and parent.target is self.target
            and not (self.emitted or parent._closed)
        )
        request = open_target(
            self.spec,
            self._settings,
            key=self.key,
            ids=self._ids,
            push_to=push_to,
            rows_from=self._drafting.rows_from,
            free_run=0 if self._drafting.attached else self._settings.free_run,
            fork_of=parent.key if parent is not None and shares else None,
        )
        self._steps.open(self.target, request, self.key)

    async def _reopen(self, error: SpecwireError) -> None:
        """The target lost the session: it goes on from the committed ids, there or elsewhere."""
        self.record.fell_back("target_lost")
        self._steps.close()
        here = self.target
        stays = error.reason in (Reason.SESSION_UNKNOWN, Reason.NEED_TOKENS)
        if not await self._place.again(self._ids, self.spec.deadline, stays=stays):
            raise self._gone(error)
        self.record.target_moves += self.target is not here
        await self._open()

    def _gone(self, error: SpecwireError) -> SpecwireError:
        text = f"the target was lost after {self.emitted} tokens: {error.message}"
        return SpecwireError(Reason.ENGINE_DOWN, text, {"tokens": str(self.emitted)})

    # -- rounds ----------------------------------------------------------------------------------

    def _ask(self, verdict: target_pb2.Verdict) -> int:
        """Tells the draft what was committed, and how many tokens the next step can use."""
        if verdict.step_id == 0:
            self._drafting.first_context(worked_ns(verdict.timings) / 1e9)
        unasked = self._steps.unasked
        if unasked:
            self._drafting.ran_ahead()
        k = 0 if unasked else self._k(len(self._ids))
        self._drafting.advance(verdict, self._ids, k)
        return k

    def _k(self, length: int) -> int:
        """Draft tokens of the next step; one of the tokens still allowed is the target's own."""
        info = self.target.info
        if info is None:
            return 0
        remaining = self.spec.answer.max_tokens - (length - len(self.spec.prompt))
        room = info.model.max_length_tokens - length
        most = min(remaining - 1, room, info.max_draft_tokens)
        return self._drafting.plan(self._steps.step, length, most)

    async def _next(self, draft: list[int]) -> None:
        """Sends the next step; without a drafter, tries to get one again first.

        Where nothing is drafted the target may run ahead.
        """
        left, step = self.spec.answer.max_tokens - self.emitted, self._steps.step
        if not self._drafting.attached and self._drafting.reattach(step, self._ids, left):
            self._steps.close()
            await self._open()
        else:
            free_run = 0 if draft else self._drafting.free_run()
            self._steps.verify(len(self._ids), draft, free_run)

    async def _verdict(self) -> target_pb2.Verdict:
        """The verdict of the awaited step; anything else is dropped and counted."""
        while True:
            try:
                arrived_ns, message = await self._steps.reply()
            except SpecwireError as error:
                if error.reason is Reason.DEADLINE:
                    text = f"deadline passed after {self.emitted} tokens"
                    raise SpecwireError(Reason.DEADLINE, text) from None
                if error.reason not in _LOST:
                    raise
                await self._reopen(error)
                continue
            if isinstance(message, target_pb2.TargetRefused):
                await self._refused(message)
            elif isinstance(message, target_pb2.Verdict) and self._steps.fits(
                message, len(self._ids)
            ):
                if message.step_id:
                    self._drafting.judged(message.accepted)
                self._steps.account(message, arrived_ns, self._drafting.waited_ns)
                return message
            else:
                self._steps.dropped()

    async def _refused(self, message: target_pb2.TargetRefused) -> None:
        if message.step_id != self._steps.step:
            self._steps.dropped()
            return
        error = from_item(message.error)
        if error.reason in _ROW_REFUSALS and self._steps.step == 0:
            self._drafting.refuse_rows(error.reason.lower())
            self._steps.close()
            await self._open()
        elif error.reason in _LOST or (error.reason in _ELSEWHERE and self.emitted):
            await self._reopen(error)
        elif (
            error.reason in _ELSEWHERE and self._steps.step == 0 and self._place.other(error.reason)
        ):
            self._steps.close()
            await self._open()
        else:
            raise error

    # -- small things ----------------------------------------------------------------------------

    def _key(self, generation: int) -> common_pb2.SessionKey:
        return common_pb2.SessionKey(
            coordinator=self._group.fleet.incarnation,
            session_id=self.session_id,
            generation=generation,
        )
