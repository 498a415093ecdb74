"""Which target a session gets: identity first, then what is cached, then load.

Targets of one model (name, weights, tokenizer) are a group. A request sees one group only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from coordinator.affinity import PrefixIndex
from coordinator.draft_worker import DraftWorker
from coordinator.offers import Offers
from coordinator.settings import CoordinatorSettings
from coordinator.target_worker import ModelKey, TargetWorker
from coordinator.text import TextModel
from coordinator.tokenizer_cache import TokenizerCache
from coordinator.turns import Turns
from coordinator.worker import Worker
from specwire.errors import Reason, SpecwireError
from specwire.rpc import new_incarnation

# A cached beginning is worth going to a worker with at most twice the sessions of the least busy
# one, and a few more: beyond that the queue costs more than the prompt.
_BUSY_FACTOR, _BUSY_SLACK = 2, 4


class Fleet:
    """All workers. Create it inside the running loop."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        cache: TokenizerCache | None = None,
        turns: Callable[[], Turns] = Turns,
    ) -> None:
        """`turns`: for each target, whose turn it is to read what it says."""
        self.settings = settings
        self.incarnation = new_incarnation()
        tokenizers = cache or TokenizerCache()
        self.targets = [
            TargetWorker(address, settings, self.incarnation, tokenizers, turns())
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
        return SpecwireError(Reason.NO_TARGET, "no target serves: " + "; ".join(map(_why, targets)))


def _why(target: TargetWorker) -> str:
    reason = target.link.reason or "no answer"
    # What says of an address that nobody answers there needs no more.
    known = target.address in reason
    return reason if known else f"{target.address} is {target.link.state}: {reason}"


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
        drafts: Callable[[TargetWorker], bool] = lambda target: True,
    ) -> TargetWorker | None:
        """The target for a session of `tokens` tokens in all that begins with `ids`.

        `numerics` restricts to targets that compute alike; those where the session can have its
        drafter (`drafts`) come first, unless they are much busier. None: no target fits and is up.
        """
        found = [t for t in self._alike(numerics) if t.link.ready and t is not avoid]
        found = [t for t in found if not t.draining] or found
        if len(found) < 2:
            return found[0] if found else None
        cached = self.fleet.prefixes.matches(ids)
        most = _BUSY_FACTOR * min(t.busy for t in found) + _BUSY_SLACK

        def rank(target: TargetWorker) -> tuple[bool, bool, int, int, int, int]:
            free, easy = target.free_tokens, target.busy <= most
            fits = free is None or free >= tokens
            have = cached.get(target.link.incarnation, 0) if easy else 0
            return fits, easy and drafts(target), have, -target.waiting, -target.busy, free or 0

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

    @property
    def offers(self) -> Offers:
        """The drafters that fit these targets."""
        fleet = self.fleet
        return Offers(self.targets, fleet.drafts, fleet.rows, self.settings)
