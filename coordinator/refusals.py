"""What a session does about a refusal of its target."""

from __future__ import annotations

from enum import Enum, auto

from specwire.errors import Reason

# At the open, where the request itself is fine: the drafter is of no use to it.
_ROW_REFUSALS = (Reason.PUSH_ADDRESS_REFUSED, Reason.ROWS_REFUSED)
_COLOCATED_REFUSALS = (
    *_ROW_REFUSALS,
    Reason.METHOD_UNKNOWN,
    Reason.MODEL_MISMATCH,
    Reason.UNSUPPORTED,
)
# The target lost the session (restart, lease, link): opening it again helps.
LOST = (Reason.ENGINE_DOWN, Reason.SESSION_UNKNOWN, Reason.NEED_TOKENS)
# The target takes no session now; another one may.
_ELSEWHERE = (Reason.DRAINING, Reason.QUEUE_FULL, Reason.KV_PAGES_EXHAUSTED)


class Remedy(Enum):
    WITHOUT_DRAFTER = auto()
    OPEN_AGAIN = auto()
    OTHER_TARGET = auto()
    NONE = auto()


def remedy(reason: Reason, step: int, *, colocated: bool, emitted: int) -> Remedy:
    """Of a refusal of `step`, in a session that has `emitted` tokens."""
    refusals = _COLOCATED_REFUSALS if colocated else _ROW_REFUSALS
    if reason in refusals and step == 0:
        return Remedy.WITHOUT_DRAFTER
    if reason in LOST or (reason in _ELSEWHERE and emitted):
        return Remedy.OPEN_AGAIN
    if reason in _ELSEWHERE and step == 0:
        return Remedy.OTHER_TARGET
    return Remedy.NONE
