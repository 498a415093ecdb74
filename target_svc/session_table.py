"""The sessions of a target by name, and the names that were closed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from target_svc.sessions import Key, Session

# Closed names are remembered for a while, so that a late duplicate of an Open revives nothing.
_CLOSED_KEPT = 4096


@dataclass(slots=True)
class SessionTable:
    """Live sessions by name; for each name at most one generation is alive."""

    _live: dict[tuple[int, int], Session] = field(default_factory=dict)
    _closed: OrderedDict[tuple[int, int], int] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._live.values()))

    def named(self, key: Key) -> Session | None:
        """The live session with this name, whatever its generation."""
        return self._live.get(key.name)

    def get(self, key: Key) -> Session | None:
        found = self._live.get(key.name)
        return found if found is not None and found.key == key else None

    def was_closed(self, key: Key) -> bool:
        """Whether this generation, or a newer one, was closed by its opener."""
        return self._closed.get(key.name, -1) >= key.generation

    def add(self, session: Session) -> None:
        assert session.key.name not in self._live
        self._live[session.key.name] = session

    def remove(self, session: Session) -> None:
        session.closed = True
        if self._live.get(session.key.name) is session:
            del self._live[session.key.name]

    def remember_closed(self, key: Key) -> None:
        generation = max(key.generation, self._closed.pop(key.name, 0))
        self._closed[key.name] = generation
        while len(self._closed) > _CLOSED_KEPT:
            self._closed.popitem(last=False)
