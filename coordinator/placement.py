"""Which target a session gets, and which drafter: identity first, then what is cached, then load.

Targets of one model (name, weights, tokenizer) are a group. A request sees one group only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.affinity import PrefixIndex
from coordinator.settings import CoordinatorSettings
from coordinator.standing import Standing
from coordinator.text import TextModel
from coordinator.tokenizer_cache import TokenizerCache
from coordinator.workers import DraftWorker, ModelKey, TargetWorker, Worker
from specwire.errors import Reason, SpecwireError
from specwire.rpc import new_incarnation
from specwire.v1 import draft_pb2

PLAIN = "plain"
# A cached beginning is worth going to a worker with at most twice the sessions of the least busy
# one, and a few more: beyond that the queue costs more than the prompt.
_BUSY_FACTOR, _BUSY_SLACK = 2, 4


@dataclass(frozen=True, slots=True)
class Choice:
    """The drafter of one session, as the worker's process that was chosen has it."""

    worker: DraftWorker
    drafter: draft_pb2.DrafterInfo
    standing: Standing

    @classmethod
    def of(cls, worker: DraftWorker, drafter: draft_pb2.DrafterInfo) -> Choice:
        return cls(worker, drafter, worker.standings[drafter.method])


class Fleet:
    """All workers. Create it inside the running loop."""

    def __init__(self, settings: CoordinatorSettings, cache: TokenizerCache | None = None) -> None:
        self.settings = settings
        self.incarnation = new_incarnation()
        tokenizers = cache or TokenizerCache()
        self.targets = [
            TargetWorker(address, settings, self.incarnation, tokenizers)
            for address in settings.target
        ]
        self.drafts = [
            DraftWorker(address, settings, self.incarnation, self.targets)
            for address in settings.draft
        ]
        # What targets have in their prefix caches, and drafts in their row caches.
        self.prefixes, self.rows = PrefixIndex(), PrefixIndex()

    def start(self) -> None:
        for worker in self.workers:
            worker.link.start()

    async def stop(self) -> None:
        for worker in reversed(self.workers):
            await worker.stop()

    @property
    def workers(self) -> list[Worker[Any]]:
        return [*self.targets, *self.drafts]

    @property
    def serving(self) -> bool:
        """Whether a request would find a target."""
        return any(target.link.ready for target in self.targets)

    def groups(self) -> list[Group]:
        """One per model seen, in the order of the addresses."""
        keys = dict.fromkeys(key for t in self.targets if (key := t.model_key) is not None)
        return [Group(self, key) for key in keys]

    def group(self, model: str) -> Group:
        """The targets of a model; of the only one for an empty name.

        Raises NO_TARGET when none of them is up, MODEL_UNKNOWN naming those that are served.
        """
        groups = self.groups()
        names = list(dict.fromkeys(group.name for group in groups))
        if not groups:
            raise self._no_target(self.targets)
        if (not model and len(names) > 1) or (model and model not in names):
            accepted = ", ".join(names)
            raise SpecwireError.field("model", model, accepted, Reason.MODEL_UNKNOWN)
        found = [group for group in groups if not model or group.name == model]
        for group in found:
            if group.ready:
                return group
        raise self._no_target([target for group in found for target in group.targets])

    def _no_target(self, targets: Sequence[TargetWorker]) -> SpecwireError:
        said = [f"{t.address} is {t.link.state}: {t.link.reason or 'no answer'}" for t in targets]
        return SpecwireError(Reason.NO_TARGET, "no target serves: " + "; ".join(said))


class Group:
    """The targets of one model and the drafters that fit them, as they are at this moment."""

    def __init__(self, fleet: Fleet, key: ModelKey) -> None:
        self.fleet, self.settings, self._key = fleet, fleet.settings, key
        self.name = key[0]

    @property
    def targets(self) -> list[TargetWorker]:
        return [t for t in self.fleet.targets if t.model_key == self._key]

    @property
    def ready(self) -> bool:
        return any(t.link.ready for t in self.targets)

    @property
    def target(self) -> TargetWorker:
        """One that speaks for all of them: an up one before one that is down."""
        return max(self.targets, key=lambda t: t.link.ready)

    @property
    def text(self) -> TextModel:
        text = self.target.text
        assert text is not None, "a target with a known model has its tokenizer"
        return text

    # -- targets ---------------------------------------------------------------------------------

    def place(
        self,
        ids: Sequence[int],
        tokens: int,
        *,
        numerics: str | None = None,
        avoid: TargetWorker | None = None,
    ) -> TargetWorker | None:
        """The target for a session of `tokens` tokens in all that begins with `ids`.

        `numerics` restricts to targets that compute alike. None: no target fits and is up.
        """
        found = [t for t in self._alike(numerics) if t.link.ready and t is not avoid]
        found = [t for t in found if not t.draining] or found
        if len(found) < 2:
            return found[0] if found else None
        cached = self.fleet.prefixes.matches(ids)
        most = _BUSY_FACTOR * min(t.busy for t in found) + _BUSY_SLACK

        def rank(target: TargetWorker) -> tuple[bool, int, int, int, int]:
            free = target.free_tokens
            fits = free is None or free >= tokens
            have = cached.get(target.link.incarnation, 0) if target.busy <= most else 0
            return fits, have, -target.waiting, -target.busy, free or 0

        return max(found, key=rank)

    async def wait_target(self, numerics: str | None, timeout_s: float) -> bool:
        """Waits until a target that computes alike is up."""
        waits = [asyncio.ensure_future(t.link.wait_ready(timeout_s)) for t in self._alike(numerics)]
        if not waits:
            return False
        try:
            for done in asyncio.as_completed(waits):
                # One that came back may compute otherwise by now.
                if await done and any(t.link.ready for t in self._alike(numerics)):
                    return True
            return False
        finally:
            for wait in waits:
                wait.cancel()

    def _alike(self, numerics: str | None) -> list[TargetWorker]:
        return [t for t in self.targets if numerics is None or t.numerics == numerics]

    # -- drafters --------------------------------------------------------------------------------

    def methods(self) -> list[str]:
        """What requests may name: plain, and each drafter that fits and was seen."""
        return [PLAIN, *sorted({c.drafter.method for c in self._choices()})]

    def default_method(self) -> str:
        known = self.methods()
        if self.settings.default_method in known:
            return self.settings.default_method
        for choice in self._choices():
            if choice.drafter.is_default:
                return choice.drafter.method
        return "ngram" if "ngram" in known else PLAIN

    def choose(self, method: str) -> Choice | None:
        """A drafter for a method, an up one before one that is down; None for plain."""
        if method == PLAIN:
            return None
        found = [c for c in self._choices() if c.drafter.method == method]
        if not found:
            accepted = ", ".join(self.methods()) + self._refusals(method)
            raise SpecwireError.field("speculation.method", method, accepted, Reason.METHOD_UNKNOWN)
        return max(found, key=lambda c: (c.worker.link.ready, not c.standing.breaker.open))

    def drafter(self, method: str, target: TargetWorker, ids: Sequence[int] = ()) -> Choice | None:
        """The drafter of a method for a session at this target; None when none fits it."""
        found = [
            Choice.of(draft, drafters[method])
            for draft in self.fleet.drafts
            if method in (drafters := draft.judge(target)[0])
        ]
        if len(found) < 2:
            return found[0] if found else None
        cached = self.fleet.rows.matches(ids)
        most = _BUSY_FACTOR * min(c.worker.busy for c in found) + _BUSY_SLACK

        def rank(choice: Choice) -> tuple[bool, bool, int, int]:
            link, busy = choice.worker.link, choice.worker.busy
            have = cached.get(link.incarnation, 0) if busy <= most else 0
            return link.ready, not choice.standing.breaker.open, have, -busy

        return max(found, key=rank)

    def _choices(self) -> list[Choice]:
        """Every drafter that fits a target of this group."""
        return [
            Choice.of(draft, drafter)
            for target in self.targets
            for draft in self.fleet.drafts
            for drafter in draft.judge(target)[0].values()
        ]

    def _refusals(self, method: str) -> str:
        texts = dict.fromkeys(
            text
            for target in self.targets
            for draft in self.fleet.drafts
            if (text := draft.judge(target)[1].get(method))
        )
        return f" ({'; '.join(texts)})" if texts else ""
