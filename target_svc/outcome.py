"""What of an engine's answer is kept: stop ids and length limits, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specwire.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class Outcome:
    tokens: tuple[int, ...]
    accepted: int
    finish: common_pb2.FinishReason


def trim(tokens: Sequence[int], accepted: int, stop_ids: frozenset[int], room: int) -> Outcome:
    """Keeps tokens up to and with the first stop id, at most `room`.

    A stop id inside an accepted block ends the session there: what was accepted behind it was
    never part of the text.
    """
    finish = common_pb2.FINISH_REASON_UNSPECIFIED
    kept: list[int] = []
    for token in tokens[:room]:
        kept.append(token)
        if token in stop_ids:
            finish = common_pb2.FINISH_REASON_STOP_TOKEN
            break
    if not finish and len(kept) == room:
        finish = common_pb2.FINISH_REASON_LENGTH
    return Outcome(tuple(kept), min(accepted, len(kept)), finish)


def usable_draft(ids: Sequence[int], vocab_size: int, limit: int) -> tuple[list[int], str]:
    """The draft up to the first bad id, and why it was cut ("" when it was not).

    A draft is a hint: it is never an error.
    """
    for index, token in enumerate(ids):
        if index == limit:
            return list(ids[:index]), "draft_too_long"
        if token >= vocab_size:
            return list(ids[:index]), "draft_id_range"
    return list(ids), ""
