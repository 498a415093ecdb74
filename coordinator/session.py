"""One session's loop: the only place that knows how a round goes, the same for every method.

    advance -> (text goes out) -> proposal -> verify -> verdict -> advance ...

With a drafter in the target's process the verdict brings the next proposal. The next verify goes
out before the text, or the target goes on with the proposal by itself, for `draft_ahead` rounds.
Without a drafter K is 0, and the target runs ahead by `free_run` steps.
The draft decides nothing: late, lost or wrong, it costs speed only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from coordinator.answer import Answer
from coordinator.opened_session import OpenedSession
from coordinator.placement import Group
from coordinator.refusals import LOST
from coordinator.spec import SessionSpec
from coordinator.text import TextModel
from specwire.errors import Reason, SpecwireError
from specwire.v1 import common_pb2, generate_pb2, target_pb2

Deliver = Callable[[generate_pb2.Delta], Awaitable[None]]
# Verdicts that make one delta at most.
_TOGETHER = 32


class Session(OpenedSession):
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
        super().__init__(group, session_id, spec, parent)
        self._answer = Answer(spec.answer, text)

    async def run(self, deliver: Deliver) -> generate_pb2.Finished:
        """Runs the session to its end. Whatever happens, both workers are told to close."""
        try:
            await self._open()
            while True:
                verdict, done = await self._news()
                if done:
                    self.close()
                delta = self._answer.take()
                if delta is not None:
                    await deliver(delta)
                if done:
                    acceptance = self.record.to_wire(self._answer.tokens)
                    return self._answer.finished(verdict, len(self.spec.prompt), acceptance)
                if self._steps.step == verdict.step_id:
                    await self._next()
        finally:
            self.shareable.set()
            self.close()

    async def _news(self) -> tuple[target_pb2.Verdict, bool]:
        """Takes in the next verdict, and those of a run ahead that are there already; never waits
        for a second one. The last one, and whether the answer ends with it."""
        verdict = await self._verdict()
        for room in reversed(range(_TOGETHER)):
            done = verdict.finish != common_pb2.FINISH_REASON_UNSPECIFIED
            self._ids.extend(verdict.tokens)
            if not done and self._ask(verdict):
                await asyncio.sleep(0)  # what was sent leaves before the text is worked on
            self._answer.add(verdict, done)
            if done or self._answer.stop:
                return verdict, True
            if self._steps.step > verdict.step_id or not self._steps.unasked:
                break  # the next one is on its way, or has to be asked for
            self._steps.follow(len(self._drafting.in_hand or ()))
            if not room or self._answer.full:
                break
            got = self._steps.arrived(len(self._ids))
            if got is None:
                break
            verdict = self._accounted(*got)
        return verdict, False

    def _ask(self, verdict: target_pb2.Verdict) -> bool:
        """Tells the draft what was committed, and how many tokens the next step can use; where its
        answer is there already, the next step goes out. Whether anything was sent that matters."""
        unasked = self._steps.unasked
        if unasked:
            self._plan.ran_ahead()
        runs_plain = unasked and not self._steps.drafts_ahead
        most = None if runs_plain else self._most(len(self._ids))
        asked = self._drafting.advance(verdict, self._ids, most)
        draft = self._drafting.in_hand
        if unasked or draft is None:
            return asked
        self._send(draft)
        return True

    async def _next(self) -> None:
        """Sends the next step; without a drafter, tries to get one again first."""
        draft = await self._drafting.proposal()
        attached = self._drafter.attached
        if not attached and self._drafter.reattach(self._steps.step, self._ids):
            await self._open_again()
        else:
            self._send(draft)

    def _send(self, draft: list[int]) -> None:
        """The next step. Where nothing is drafted the target may run ahead; each of its steps
        brings a token at least, and the last one the proposal of a drafter beside it. With such a
        drafter's tokens it may run ahead too."""
        self.shareable.set()
        free_run = 0 if draft else self._plan.free_run()
        step = self._steps.step + 1 + free_run
        shortest = len(self._ids) + 1 + free_run
        most = self._most(shortest)
        then_propose, ahead = self._drafting.then_propose(
            step, shortest + len(draft), most, bool(draft)
        )
        wait_us = self._drafting.wait_us if ahead else 0
        self._steps.verify(
            len(self._ids), draft, free_run or ahead, then_propose, ahead > 0, wait_us
        )

    async def _verdict(self) -> target_pb2.Verdict:
        """The verdict of the awaited step; anything else is dropped and counted."""
        while True:
            try:
                arrived_ns, message = await self._steps.reply()
            except SpecwireError as error:
                if error.reason is Reason.DEADLINE:
                    text = f"deadline passed after {self.emitted} tokens"
                    raise SpecwireError(Reason.DEADLINE, text) from None
                if error.reason not in LOST:
                    raise
                await self._reopen(error)
                continue
            if isinstance(message, target_pb2.TargetRefused):
                await self._refused(message)
            elif isinstance(message, target_pb2.Verdict) and self._steps.fits(
                message, len(self._ids)
            ):
                return self._accounted(arrived_ns, message)
            else:
                self._steps.dropped()

    def _accounted(self, arrived_ns: int, verdict: target_pb2.Verdict) -> target_pb2.Verdict:
        """The same verdict, once those who learn from it have heard of it."""
        drafting = self._drafting
        if verdict.step_id:
            drafting.judged(verdict.accepted)
            # Not when it arrived: what all sessions yield is counted in the order of this.
            self._plan.came(len(verdict.tokens), time.perf_counter())
        drafting.believe(verdict)
        self._steps.account(verdict, arrived_ns, drafting.waited_ns, drafting.drafted_ns)
        return verdict
