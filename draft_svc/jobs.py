"""What the event loop asks of the engine thread, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from draft_svc.methods.base import Draft, RowBlock
from engine.api import Sampling
from specwire.errors import SpecwireError


@dataclass(slots=True, eq=False)
class Handle:
    """The loop's name for a context; only the engine thread looks inside."""

    method: str
    context: Any = None


@dataclass(frozen=True, slots=True)
class OpenJob:
    handle: Handle
    ids: Sequence[int]
    sampling: Sampling
    target_fingerprint: str
    # Called with the error, or with the interval of rows that the context has already.
    done: Callable[[SpecwireError | None, tuple[int, int]], None]


# Jobs of every round are tuples: a frozen dataclass takes three times as long.
class UpdateJob(NamedTuple):
    handle: Handle
    keep: int
    tokens: Sequence[int]
    rows: Sequence[RowBlock]


class Computed(NamedTuple):
    """A finished proposal, or the error that stands for it."""

    draft: Draft
    error: SpecwireError | None
    compute_ns: int
    # Beside it: what the method need not do again, such as the capture of a graph.
    once_ns: int = 0


class ProposeJob(NamedTuple):
    handle: Handle
    k: int
    # Of the monotonic clock.
    deadline: float
    done: Callable[[Computed], None]


@dataclass(frozen=True, slots=True)
class CloseJob:
    handle: Handle


Job = OpenJob | UpdateJob | ProposeJob | CloseJob
