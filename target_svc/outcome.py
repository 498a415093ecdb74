"""What of an engine's answer is kept: stop ids and length limits, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specwire.v1 import common_pb2

_GOES_ON = common_pb2.FINISH_REASON_UNSPECIFIED


class Outcome(NamedTuple):
    tokens: tuple[int, ...]
    accepted: int
    finish: common_pb2.FinishReason


def trim(tokens: Sequence[int], accepted: int, stop_ids: frozenset[int], room: int) -> Outcome:
    """Keeps tokens up to and with the first stop id, at most `room`.

    A stop id inside an accepted block ends the session there: what was accepted behind it was
    never part of the text.
    """
    if len(tokens) < room and stop_ids.isdisjoint(tokens):  # as almost always
        return Outcome(tuple(tokens), accepted, _GOES_ON)
    finish = _GOES_ON
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
    kept = list(ids)
    if len(kept) <= limit and (not kept or max(kept) < vocab_size):
        return kept, ""
    for index, token in enumerate(kept):
        if index == limit:
            return kept[:index], "draft_too_long"
        if token >= vocab_size:
            return kept[:index], "draft_id_range"
    raise AssertionError("it is one or the other")
