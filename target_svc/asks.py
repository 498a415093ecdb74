"""What a target asks a draft service for in a run ahead, and who waits for the answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from specwire.v1 import common_pb2, draft_pb2

Name = tuple[int, int, int]  # the three numbers of a session's key

Answer = common_pb2.Proposal | draft_pb2.DraftRefused
# Called once with whatever comes of a question.
Answered = Callable[[Answer], None]
# Of a stream that is down or breaks.
LOST = draft_pb2.DraftRefused(error=common_pb2.ItemError(reason="DRAFT_LOST"))


class Question(NamedTuple):
    """What was committed behind `base_len`, and that `k` tokens are wanted; 0: none, but the draft
    follows. As many rows are on their way, from `base_len - 1` on."""

    step_id: int
    base_len: int
    tokens: list[int]
    k: int
    wait_us: int


class OpenAsks:
    """Open questions of one stream, at most one for each session."""

    def __init__(self) -> None:
        self._open: dict[Name, tuple[int, Answered]] = {}

    def add(self, name: Name, step_id: int, answered: Answered) -> None:
        self._open[name] = step_id, answered

    def pop(self, name: Name) -> None:
        self._open.pop(name, None)

    def answer(self, reply: draft_pb2.DraftReply) -> bool:
        """Passes a proposal or a refusal on; False: it answers no open question."""
        kind = reply.WhichOneof("reply")
        if kind not in ("proposal", "refused"):
            return False
        message = reply.proposal if kind == "proposal" else reply.refused
        key = message.key
        name = key.coordinator, key.session_id, key.generation
        if name not in self._open or self._open[name][0] != message.step_id:
            return False
        _, answered = self._open.pop(name)
        answered(message)
        return True

    def fail(self) -> None:
        """The stream broke: nobody will answer."""
        waiting, self._open = self._open, {}
        for _, answered in waiting.values():
            answered(LOST)
