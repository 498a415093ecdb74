"""One session as its workers have it: opened at draft and target, lost, opened again there or
elsewhere, closed.

A target that is lost is opened once more with the committed ids; noise is keyed by position, so the
text goes on as it would have.
"""

from __future__ import annotations

import asyncio

from coordinator.attachment import Attachment
from coordinator.colocated import Colocated
from coordinator.drafters import PLAIN
from coordinator.drafting import Drafting
from coordinator.place import Place
from coordinator.placement import Group
from coordinator.plain import Plain
from coordinator.plan import Plan
from coordinator.record import Record
from coordinator.refusals import Remedy, remedy
from coordinator.separate import Separate
from coordinator.spec import SessionSpec, open_target
from coordinator.steps import Steps
from coordinator.target_worker import TargetWorker
from specwire.errors import Reason, SpecwireError, from_item
from specwire.v1 import common_pb2, target_pb2


class OpenedSession:
    def __init__(
        self,
        group: Group,
        session_id: int,
        spec: SessionSpec,
        parent: OpenedSession | None = None,
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
        self._drafter = Attachment(
            group,
            self.target,
            spec.wanted,
            sampling=spec.answer.sampling,
            k=spec.k,
            deadline=spec.deadline,
            record=self.record,
            adaptive=spec.adaptive_k,
            ends_at=len(spec.prompt) + answer.max_tokens,
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

    def close(self) -> None:
        """Tells both workers that the session is over. Synchronous, and safe to repeat."""
        if self._closed:
            return
        self._closed = True
        self._drafter.close()
        self._steps.close()
        self._place.leave(self._ids)

    async def _open(self) -> None:
        """Draft first, target second: rows must find their session."""
        if self._parent is not None:
            await self._parent.shareable.wait()
        self.key = self._key(self._drafter.generation + 1)
        await self._drafter.open(self.key, self._ids, self.target)
        self._begin()

    async def _open_again(self) -> None:
        """For a drafter that the target was not opened for."""
        self._steps.close()
        if not self._drafter.ahead:
            await self._open()
            return
        self.key = self._drafter.begin_ahead()
        self._begin()

    def _begin(self) -> None:
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

    def _most(self, length: int) -> int:
        """Draft tokens that a step at this length can use; one of those still allowed is the
        target's own."""
        spec, target = self.spec, self._place.target
        if target.info is None:
            return 0
        remaining = spec.answer.max_tokens - (length - len(spec.prompt))
        return min(remaining - 1, target.max_length - length, target.most_draft_tokens)

    def _key(self, generation: int) -> common_pb2.SessionKey:
        return common_pb2.SessionKey(
            coordinator=self._group.fleet.incarnation,
            session_id=self.session_id,
            generation=generation,
        )
