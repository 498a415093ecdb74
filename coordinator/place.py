"""Where one session runs: at which target, and where it goes on when that one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from coordinator.drafters import Wanted
from coordinator.placement import Group
from coordinator.target_worker import TargetWorker
from specwire.errors import Reason, SpecwireError
from specwire.v1 import common_pb2

# Before a target that still answers, but lost its engine, is tried again.
_PAUSE_S = 0.1


class Place:
    """Counts the session at its target. Raises NO_TARGET when there is none to begin at."""

    def __init__(
        self,
        group: Group,
        prompt: Sequence[int],
        max_tokens: int,
        exactness: common_pb2.Exactness,
        target: TargetWorker | None,
        wanted: Wanted | None = None,
    ) -> None:
        """`wanted`: the drafter that the session is to have where there is a choice of targets."""
        self._group, self._tokens = group, len(prompt) + max_tokens
        self._again, self._others, self._left = 0, 0, False

        def drafts(target: TargetWorker) -> bool:
            return wanted is None or group.offers.drafter(wanted, target) is not None

        self._find = partial(group.place, drafts=drafts)
        found = target or self._find(prompt, self._tokens)
        if found is None:
            raise SpecwireError(Reason.NO_TARGET, "the targets went away while the request came")
        self.target = found
        self._prompt = prompt
        # What another target must share: an exact session is computed in one way only. Kept from
        # its beginning: the target itself may come back as one that computes otherwise.
        exact = exactness == common_pb2.EXACTNESS_EXACT
        self._numerics = found.numerics if exact else None
        self._enter(found)

    def _enter(self, target: TargetWorker) -> None:
        self.target = target
        target.placed += 1
        self._group.fleet.prefixes.note(self._prompt, target.link.incarnation)

    def _move(self, target: TargetWorker) -> None:
        self.target.placed -= 1
        self._enter(target)

    def leave(self, ids: Sequence[int]) -> None:
        """The session is over; its target has these ids in its cache."""
        if not self._left:
            self._left = True
            self.target.placed -= 1
            self._group.fleet.prefixes.note(ids[:-1], self.target.link.incarnation)

    def other(self, why: Reason) -> bool:
        """Moves a session that has not begun away from a target that does not take it."""
        if why is Reason.DRAINING:
            self.target.draining = True
        if self._others >= len(self._group.targets) - 1:
            return False
        self._others += 1
        found = self._find(self._prompt, self._tokens, avoid=self.target)
        if found is not None:
            self._move(found)
        return found is not None

    async def again(self, ids: Sequence[int], deadline: float | None, *, stays: bool) -> bool:
        """Finds where a lost session goes on, a bounded number of times: at once at a target that
        computes alike, else at the first that comes back in time. `stays`: the target itself is
        fine, only the session is lost."""
        settings, numerics = self._group.settings, self._numerics
        if self._again >= settings.target_moves:
            return False
        self._again += 1
        if stays and self.target.link.ready:
            return True
        found = self._find(ids, self._tokens, numerics=numerics, avoid=self.target)
        if found is None:
            await asyncio.sleep(_PAUSE_S)
            wait_s = settings.target_return_ms / 1000
            if deadline is not None:
                wait_s = min(wait_s, deadline - asyncio.get_running_loop().time())
            if not await self._group.wait_target(numerics, wait_s):
                return False
            found = self._find(ids, self._tokens, numerics=numerics)
        if found is not None:
            self._move(found)
        return found is not None
