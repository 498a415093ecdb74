"""Rounds that a target goes on for with a draft service, asking it on the stream of its rows: what
would be four hops a round through here is two between them.
"""

from __future__ import annotations

from coordinator.brought import Brought
from specwire.v1 import target_pb2


class RunAhead(Brought):
    """Is `on` from the step that begins a run until its last verdict."""

    @property
    def on(self) -> bool:
        return self._asked > 0

    @property
    def in_hand(self) -> list[int] | None:
        """None outside a run, but for what its last verdict brought."""
        return self._proposal if self.on or self._round_k else None

    def then_propose(self, step: int, length: int, most: int, drafted: bool) -> tuple[int, int]:
        raise NotImplementedError("the rounds of the draft service decide that")

    def begin(self, asked: int, ahead: int) -> None:
        """After the step that is about to be sent the target goes on for `ahead` rounds, each with
        `asked` tokens."""
        self._proposal = []
        self._begin(asked, ahead)

    def end(self) -> None:
        self._proposal, self._asked, self._ahead = [], 0, 0

    def advance(self, verdict: target_pb2.Verdict, ids: list[int], most: int | None) -> bool:
        super().advance(verdict, ids, most)
        # By the target; a question without an answer may never have come there.
        self._at.told = len(ids) if verdict.HasField("proposal") else verdict.base_len
        return False

    def _missing(self) -> None:
        assert self._at.choice is not None
        self._record.fell_back("late")
        self._at.choice.standing.breaker.failure(self._asked_s)

    def _failed(self, cause: str) -> None:
        """Where the last verdict brought none the draft service is asked for it once more: that is
        the same round."""
        if self.on:
            super()._failed(cause)
        else:
            self._round_k = 0

    def _busy(self) -> int:
        assert self._at.choice is not None
        return self._at.choice.worker.busy
