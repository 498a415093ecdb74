"""One session's loop: the only place that knows how a round goes, the same for every method.

    advance -> (text goes out) -> proposal -> verify -> verdict -> advance ...

With a drafter in the target's process the verdict brings the next proposal. The next verify goes
out before the text, or the target goes on with the proposal by itself, for `draft_ahead` rounds.
Without a drafter K is 0, and the target runs ahead by `free_run` steps.
The draft decides nothing: late, lost or wrong, it costs speed only. A target that is lost is opened
once more with the committed ids; noise is keyed by position, so the text goes on as it would have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from coordinator.answer import Answer
from coordinator.attachment import Attachment
from coordinator.colocated import Colocated
from coordinator.drafters import PLAIN
from coordinator.drafting import Drafting
from coordinator.place import Place
from coordinator.placement import Group
from coordinator.plain import Plain
from coordinator.plan import Plan
from coordinator.record import Record
from coordinator.refusals import LOST, Remedy, remedy
from coordinator.separate import Separate
from coordinator.spec import SessionSpec, open_target
from coordinator.steps import Steps
from coordinator.text import TextModel
from coordinator.workers import TargetWorker
from specwire.errors import Reason, SpecwireError, from_item
from specwire.v1 import common_pb2, generate_pb2, target_pb2

Deliver = Callable[[generate_pb2.Delta], Awaitable[None]]
# Verdicts that make one delta at most.
_TOGETHER = 32


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
        self.record = Record(spec.wanted.method if spec.wanted is not None else PLAIN)
        self._group, self._settings = group, group.settings
        answer, beside = spec.answer, parent.target if parent is not None else None
        self._place = Place(
            group, spec.prompt, answer.max_tokens, answer.exactness, beside, spec.wanted
        )
        self.session_id = session_id
        self.key = self._key(0)
        self._ids = list(spec.prompt)
        self._answer = Answer(spec.answer, text)
        self._drafter = Attachment(
            group,
            self.target,
            spec.wanted,
            sampling=spec.answer.sampling,
            k=spec.k,
            deadline=spec.deadline,
            record=self.record,
        )
        self._plan = Plan(self._drafter, group.settings, self.record, spec.k, spec.adaptive_k)
        self._drafting = self._drafting_here()
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

    def close(self) -> None:
        """Tells both workers that the session is over. Synchronous, and safe to repeat."""
        if self._closed:
            return
        self._closed = True
        self._drafter.close()
        self._steps.close()
        self._place.leave(self._ids)

    # -- open ------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Draft first, target second: rows must find their session."""
        if self._parent is not None:
            await self._parent.shareable.wait()
        self.key = self._key(self.key.generation + 1)
        await self._drafter.open(self.key, self._ids, self.target)
        self._plan.begin()
        self._drafting = self._drafting_here()
        push_to = self._drafter.push_to()
        self._open_target(push_to)
        if push_to is None:
            self.shareable.set()

    def _drafting_here(self) -> Drafting:
        """How rounds go with the drafter that this generation has."""
        kind: type[Drafting] = Plain if self._drafter.given_up else Separate
        if self._drafter.colocated:
            kind = Colocated
        return kind(self._drafter, self._plan, self._settings, self.record)

    def _open_target(self, push_to: target_pb2.PushTo | None) -> None:
        parent = self._parent
        # A prompt is shared before the first token, with a session that is still there.
        shares = (
            parent is not None
            and parent.target is self.target
            and not (self.emitted or parent._closed)
        )
        length = len(self._ids) + 1
        first, _ = self._drafting.then_propose(0, length, self._most(length), False)
        request = open_target(
            self.spec,
            self._settings,
            key=self.key,
            ids=self._ids,
            push_to=push_to,
            colocated=self._drafter.beside(first),
            rows_from=self._drafter.have_rows,
            free_run=0 if self._drafter.attached else self._settings.free_run,
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

    def _most(self, length: int) -> int:
        """Draft tokens that a step at this length can use; one of those still allowed is the
        target's own."""
        spec, target = self.spec, self._place.target
        if target.info is None:
            return 0
        remaining = spec.answer.max_tokens - (length - len(spec.prompt))
        return min(remaining - 1, target.max_length - length, target.most_draft_tokens)

    async def _next(self) -> None:
        """Sends the next step; without a drafter, tries to get one again first."""
        draft = await self._drafting.proposal()
        self.shareable.set()
        left, step = self.spec.answer.max_tokens - self.emitted, self._steps.step
        if not self._drafter.attached and self._drafter.reattach(step, self._ids, left):
            self._steps.close()
            await self._open()
        else:
            self._send(draft)

    def _send(self, draft: list[int]) -> None:
        """The next step. Where nothing is drafted the target may run ahead; each of its steps
        brings a token at least, and the last one the proposal of a drafter beside it. With such a
        drafter's tokens it may run ahead too."""
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

    async def _refused(self, message: target_pb2.TargetRefused) -> None:
        error = from_item(message.error)
        if message.step_id != self._steps.step:
            if message.step_id == 0 and error.reason is Reason.ROWS_REFUSED:
                # Rows that a drafter attached later would need: the target has dropped them.
                self.record.fell_back("rows_gone")
            else:
                self._steps.dropped()
            return
        step, colocated = self._steps.step, self._drafter.colocated
        found = remedy(error.reason, step, colocated=colocated, emitted=self.emitted)
        if found is Remedy.OPEN_AGAIN:
            await self._reopen(error)
            return
        if found is Remedy.WITHOUT_DRAFTER:
            self._drafter.refused(error.reason.lower())
        elif found is Remedy.NONE or not self._place.other(error.reason):
            raise error
        self._steps.close()
        await self._open()

    # -- small things ----------------------------------------------------------------------------

    def _key(self, generation: int) -> common_pb2.SessionKey:
        return common_pb2.SessionKey(
            coordinator=self._group.fleet.incarnation,
            session_id=self.session_id,
            generation=generation,
        )
