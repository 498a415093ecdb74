"""Which drafter a session gets: those that fit its target, co-located ones first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coordinator.affinity import PrefixIndex
from coordinator.draft_worker import DraftWorker
from coordinator.drafters import COLOCATED, PLAIN, SEPARATE, Wanted
from coordinator.settings import CoordinatorSettings
from coordinator.standing import Standing
from coordinator.target_worker import TargetWorker
from specwire.errors import Reason, SpecwireError
from specwire.v1 import draft_pb2

# A drafter that has rows of a prompt is worth going to with at most twice the sessions of the least
# busy one, and a few more.
_BUSY_FACTOR, _BUSY_SLACK = 2, 4


@dataclass(frozen=True, slots=True)
class Choice:
    """The drafter of one session, as the process that was chosen has it: a draft service's, or the
    session's target's own."""

    worker: DraftWorker | TargetWorker
    drafter: draft_pb2.DrafterInfo
    standing: Standing

    @property
    def placement(self) -> str:
        return COLOCATED if isinstance(self.worker, TargetWorker) else SEPARATE


class Offers:
    """The drafters that fit some targets, as they are at this moment."""

    def __init__(
        self,
        targets: Sequence[TargetWorker],
        drafts: Sequence[DraftWorker],
        rows: PrefixIndex,
        settings: CoordinatorSettings,
    ) -> None:
        """`rows`: what draft services have in their row caches."""
        self._targets, self._drafts = targets, drafts
        self._rows, self._settings = rows, settings

    def methods(self) -> list[str]:
        """What requests may name: plain, and each drafter that was seen and fits; where one method
        is in both places, with the place too."""
        places: dict[str, set[str]] = {}
        for choice in self._all():
            places.setdefault(choice.drafter.method, set()).add(choice.placement)
        names = [
            [name, *(f"{name}@{place}" for place in sorted(at) if len(at) > 1)]
            for name, at in sorted(places.items())
        ]
        return [PLAIN, *(name for group in names for name in group)]

    def default_method(self) -> str:
        wanted = self._settings.default_method
        if wanted == PLAIN or self._fitting(Wanted.parse(wanted)):
            return wanted
        for choice in self._all():
            if choice.drafter.is_default:
                return choice.drafter.method
        return "ngram" if self._fitting(Wanted("ngram")) else PLAIN

    def choose(self, name: str) -> Choice | None:
        """A drafter for what a request names, an up one before one that is down; None for plain.

        Raises METHOD_UNKNOWN naming what is accepted.
        """
        if name == PLAIN:
            return None
        wanted = Wanted.parse(name)
        found = self._fitting(wanted)
        if not found:
            accepted = ", ".join(self.methods()) + self._refusals(wanted.method)
            raise SpecwireError.field("speculation.method", name, accepted, Reason.METHOD_UNKNOWN)
        return max(found, key=_standing_rank)

    def drafter(
        self,
        wanted: Wanted,
        target: TargetWorker,
        ids: Sequence[int] = (),
        keep: object = None,
    ) -> Choice | None:
        """The drafter for a session with these ids at this target; None when none fits it.

        `keep`: the worker that follows the session already.
        """
        found = [c for c in self._at(target) if wanted.fits(c.drafter.method, c.placement)]
        if len(found) < 2:
            return found[0] if found else None
        cached = self._rows.matches(ids)
        most = _BUSY_FACTOR * min(c.worker.busy for c in found) + _BUSY_SLACK

        def rank(choice: Choice) -> tuple[bool, bool, bool, bool, int, int]:
            worker = choice.worker
            have = cached.get(worker.link.incarnation, 0) if worker.busy <= most else 0
            return *_standing_rank(choice), worker is keep, have, -worker.busy

        return max(found, key=rank)

    def _fitting(self, wanted: Wanted) -> list[Choice]:
        return [c for c in self._all() if wanted.fits(c.drafter.method, c.placement)]

    def _all(self) -> Iterator[Choice]:
        for target in self._targets:
            yield from self._at(target)

    def _at(self, target: TargetWorker) -> Iterator[Choice]:
        """Every drafter that a session at this target could have."""
        inside = target.colocated
        if inside is not None and target.info is not None:
            for method, drafter in inside.judge(target.info)[0].items():
                yield Choice(target, drafter, inside.standings[method])
        for draft in self._drafts:
            for method, drafter in draft.judge(target)[0].items():
                yield Choice(draft, drafter, draft.standings[method])

    def _refusals(self, method: str) -> str:
        texts: dict[str, None] = {}
        for target in self._targets:
            judged = [draft.judge(target) for draft in self._drafts]
            if target.colocated is not None and target.info is not None:
                judged.append(target.colocated.judge(target.info))
            texts |= {refused[method]: None for _, refused in judged if method in refused}
        return f" ({'; '.join(texts)})" if texts else ""


def _standing_rank(choice: Choice) -> tuple[bool, bool, bool]:
    up, open_ = choice.worker.link.ready, choice.standing.breaker.open
    return up, not open_, choice.placement == COLOCATED
