"""Lookup in the session's own text: what followed the last time the text ended like this?

No model: for every n from `max_n` down to `min_n` an index maps each n-gram to its most recent end.
An n-gram enters the index only when a token follows it, so the text's own suffix never matches
itself. Each token logs what its insertions replaced, which makes truncation exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from draft_svc.costs import measure
from draft_svc.methods.base import (
    REASON_CAPACITY,
    REASON_NO_MATCH,
    Draft,
    Method,
    MethodInfo,
    Request,
    RowBlock,
)
from engine.api import Sampling, never

# Longer matches are not told apart.
MATCH_LIMIT = 16
# A token takes some 400 bytes of index.
LENGTH_LIMIT = 1 << 17


class NgramIndex:
    """A growing text and, per n, the most recent end of each n-gram that something follows.

    What is beyond `limit` tokens is counted, not kept.
    """

    __slots__ = ("_ends", "_limit", "_max_n", "_min_n", "_replaced", "ids", "length")

    def __init__(
        self, min_n: int, max_n: int, ids: Sequence[int] = (), limit: int = LENGTH_LIMIT
    ) -> None:
        self._min_n, self._max_n, self._limit = min_n, max_n, limit
        self.length = 0
        self.ids: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        # Per token: the entries that indexing the text before it replaced, shortest n-gram first
        # (None: a new entry).
        self._replaced: list[tuple[int | None, ...]] = []
        self.extend(ids)

    def extend(self, tokens: Sequence[int]) -> None:
        room = self._limit - self.length
        self.length += len(tokens)
        tokens = tokens[: max(room, 0)]
        ids, ends, min_n, max_n = self.ids, self._ends, self._min_n, self._max_n
        for token in tokens:
            end = len(ids)
            window = tuple(ids[max(end - max_n, 0) :])
            replaced = []
            for n in range(min_n, len(window) + 1):
                gram = window[-n:]
                replaced.append(ends.get(gram))
                ends[gram] = end
            self._replaced.append(tuple(replaced))
            ids.append(token)

    def truncate(self, length: int) -> None:
        """Forgets tokens from `length` on; the index is what it was then."""
        self.length = min(self.length, length)
        while len(self.ids) > length:
            self.ids.pop()
            end = len(self.ids)
            for n, before in enumerate(self._replaced.pop(), start=self._min_n):
                gram = tuple(self.ids[end - n :])
                if before is None:
                    del self._ends[gram]
                else:
                    self._ends[gram] = before

    def lookup(self, k: int) -> tuple[int, tuple[int, ...]]:
        """How long the match is, up to `MATCH_LIMIT`, and the k tokens after it: the most recent
        earlier occurrence of the longest known suffix; (0, ()) without one.

        A match close to the end is continued into what it proposes, so that a repeating text goes
        on repeating.
        """
        ids = self.ids
        if self.length > len(ids):
            return 0, ()
        for n in range(min(self._max_n, len(ids)), self._min_n - 1, -1):
            end = self._ends.get(tuple(ids[-n:]))
            if end is not None:
                period = len(ids) - end
                found = ids[end : end + k]
                while len(found) < k:
                    found.append(found[len(found) - period])
                return self._match_length(end, n), tuple(found)
        return 0, ()

    def _match_length(self, end: int, known: int) -> int:
        """How many tokens before `end` equal those at the end of the text; `known` of them do."""
        ids, length = self.ids, known
        while length < min(end, MATCH_LIMIT) and ids[end - length - 1] == ids[-length - 1]:
            length += 1
        return length


class NgramMethod(Method[NgramIndex]):
    """Prompt and output lookup. It needs ids only, so any target and any tokenizer will do."""

    name = "ngram"

    def __init__(
        self, *, min_n: int, max_n: int, max_draft_tokens: int, max_length: int = LENGTH_LIMIT
    ) -> None:
        self._min_n, self._max_n, self._max_length = min_n, max_n, max_length
        self._info = MethodInfo(
            method=self.name,
            name=f"ngram-{min_n}-{max_n}",
            max_draft_tokens=max_draft_tokens,
            max_length_tokens=max_length,
        )

    @property
    def info(self) -> MethodInfo:
        return self._info

    def warm_up(self, stopped: Callable[[], bool] = never) -> None:
        costs = measure(self, self._filled, tokens=self._info.max_draft_tokens)
        self._info = replace(self._info, costs=costs)

    def _filled(self, sessions: int, length: int) -> list[NgramIndex]:
        text = [index % (self._max_n + 1) for index in range(length)]
        return [self.open(text, Sampling()) for _ in range(sessions)]

    def open(self, ids: Sequence[int], sampling: Sampling) -> NgramIndex:
        return NgramIndex(self._min_n, self._max_n, ids, self._max_length)

    def update(
        self, context: NgramIndex, keep: int, tokens: Sequence[int], rows: Sequence[RowBlock]
    ) -> None:
        context.truncate(keep)
        context.extend(tokens)

    def propose(self, requests: Sequence[Request[NgramIndex]]) -> list[Draft]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: Request[NgramIndex]) -> Draft:
        if request.context.length > self._max_length:
            return Draft(reason=REASON_CAPACITY)
        _, ids = request.context.lookup(request.k)
        return Draft(ids, reason="" if ids else REASON_NO_MATCH)

    def close(self, context: NgramIndex) -> None:
        """Nothing is shared; the index goes with the context."""
