"""Sessions of the draft service and their leases. State of the event loop; contexts live on the
engine thread.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from draft_svc.coverage import Coverage
from draft_svc.jobs import Handle
from draft_svc.methods.base import MethodInfo
from specwire.v1 import common_pb2, draft_pb2

Reply = Callable[[draft_pb2.DraftReply], None]


@dataclass(slots=True)
class Step:
    """The newest Advance of a session; its answer is kept for repeats. `deadline` is of the
    monotonic clock: who asked waits no longer.
    """

    step_id: int
    base_len: int
    length: int
    k: int
    reply: Reply
    arrived_ns: int
    deadline: float = math.inf
    k_cut: bool = False
    timer: asyncio.TimerHandle | None = None
    proposing: bool = False
    answer: draft_pb2.DraftReply | None = None

    @property
    def open(self) -> bool:
        return self.answer is None


@dataclass(slots=True)
class Session:
    """One session. `length` counts committed ids; without rows to read `coverage` is None.
    `projected`: its rows have the draft's `fc` and norm applied."""

    key: common_pb2.SessionKey
    info: MethodInfo
    handle: Handle
    length: int
    k_limit: int
    lease_ms: int
    expires_at: float
    deadline_at: float | None
    target_incarnation: int
    coverage: Coverage | None
    open_reply: Reply
    projected: bool = False
    opened: bool = False
    step: Step | None = None

    @property
    def busy(self) -> bool:
        """A step is being computed or waits: the lease must not end now."""
        return not self.opened or (self.step is not None and self.step.open)

    def renew(self, now: float) -> None:
        self.expires_at = now + self.lease_ms / 1000


Identity = tuple[int, int]


def identity(key: common_pb2.SessionKey) -> Identity:
    """What a session is called whatever its generation."""
    return key.coordinator, key.session_id


@dataclass(slots=True)
class SessionTable:
    """All sessions, at most one generation of each."""

    _sessions: dict[Identity, Session] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def any_generation(self, key: common_pb2.SessionKey) -> Session | None:
        return self._sessions.get(identity(key))

    def find(self, key: common_pb2.SessionKey) -> Session | None:
        """The session with exactly this generation."""
        session = self._sessions.get(identity(key))
        return session if session and session.key.generation == key.generation else None

    def holds(self, session: Session) -> bool:
        """False once the session was closed or replaced."""
        return self._sessions.get(identity(session.key)) is session

    def add(self, session: Session) -> None:
        self._sessions[identity(session.key)] = session

    def remove(self, session: Session) -> None:
        if self.holds(session):
            del self._sessions[identity(session.key)]

    def expired(self, now: float) -> list[Session]:
        return [s for s in self if not s.busy and _ends_at(s) <= now]


def _ends_at(session: Session) -> float:
    if session.deadline_at is None:
        return session.expires_at
    return min(session.expires_at, session.deadline_at)
