"""The drafter's half of one session's rounds: asking, waiting, reading; wherever the drafter is.

What a drafter says is a hint: ids that cannot be are dropped, replies for another step or length
too. Nothing here raises into the session.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from coordinator.attachment import Attachment
from coordinator.plan import Plan
from coordinator.record import Record
from coordinator.settings import CoordinatorSettings
from specwire.v1 import common_pb2, target_pb2

# Why a proposal may be empty and yet tell how good the drafter is; without rows, pages or time it
# does not.
_JUDGED = ("", "no_match", "no_proposal")


class Drafting(ABC):
    """The rounds of one generation: `separate.py` with a draft service, `colocated.py` with the
    target's own drafter. Who follows the session, and how many tokens are asked for, is the same
    for both: `Attachment` and `Plan`."""

    def __init__(
        self, at: Attachment, plan: Plan, settings: CoordinatorSettings, record: Record
    ) -> None:
        self._at, self._plan, self._settings, self._record = at, plan, settings, record
        # Tokens asked for in this round, and whether a proposal came that says what it is worth.
        self._round_k, self._proposed, self._source = 0, False, ""
        # How long this round's question kept the session waiting, at most, and for how long a
        # draft service computed its answer.
        self.waited_ns, self.drafted_ns = 0, 0

    @abstractmethod
    def advance(self, verdict: target_pb2.Verdict, ids: list[int], most: int | None) -> bool:
        """Tells the drafter what was committed, `ids` in all. The next step can use `most` tokens;
        None: it is on its way already. True: something was asked for now."""

    @property
    @abstractmethod
    def in_hand(self) -> list[int] | None:
        """The tokens for the next step where nobody has to wait for them; None: ask `proposal`."""

    @abstractmethod
    async def proposal(self) -> list[int]:
        """The tokens for the next step; none when there are none, or they are late."""

    def then_propose(self, step: int, length: int, most: int, drafted: bool) -> tuple[int, int]:
        """Tokens, at most `most`, that the target is to bring with the verdict of `step`, for the
        step after it; a session may have `length` tokens by then. And for how many rounds it may go
        on so by itself behind `step`, which is about to be sent, and has tokens where it `drafted`.
        None, where nobody asks through the target.
        """
        return 0, 0

    @property
    def wait_us(self) -> int:
        """Longest wait of the target for a proposal, where that comes from elsewhere."""
        return 0

    @abstractmethod
    def believe(self, verdict: target_pb2.Verdict) -> None:
        """Puts right, in place, what a drafter elsewhere claims of its times in a verdict."""

    def judged(self, accepted: int) -> None:
        """The verdict over this round's proposal."""
        if self._round_k:
            self._plan.note(self._round_k, accepted, proposed=self._proposed)
        if self._source and accepted:
            self._record.came_from(self._source, accepted)
        self._round_k, self._source = 0, ""

    def _take(
        self, proposal: common_pb2.Proposal, k: int, length: int, room: int, whole: bool = False
    ) -> tuple[list[int], str]:
        """Tokens worth verifying, at most `room`, of a proposal that answers a question for `k`,
        which may be more; and why there are none. `whole`: they are verified already, all of them.
        """
        ids = self._usable(proposal.ids, k)
        ids = ids if whole else ids[:room]
        cause = "" if ids else proposal.reason or "no_proposal"
        if cause:
            self._record.fell_back(cause)
        self._proposed, self._source = cause in _JUDGED, proposal.source
        if whole:
            return ids, cause
        return self._plan.cut(ids, proposal.confidences[: len(ids)], length), cause

    def _usable(self, proposed: Sequence[int], k: int) -> list[int]:
        """At most k ids, up to the first that the target's vocabulary does not have."""
        vocab = self._at.target.vocab_size
        given = proposed[:k]
        if given and max(given) < vocab and len(given) == len(proposed):
            return list(given)
        ids: list[int] = []
        for token in given:
            if token >= vocab:
                self._at.dropped("vocab_range")
                break
            ids.append(token)
        if len(proposed) > k:
            self._at.dropped("too_many")
        return ids
