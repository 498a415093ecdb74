"""A small autoregressive model with the target's tokenizer.

It reads ids only: what is committed is run through the model once, in chunks, and a proposal is `k`
single steps that all sessions take together. Tokens are drawn as the target draws them, with the
same noise at the same index, so the two agree as often as their logits do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from draft_svc.costs import first_runs, measure
from draft_svc.gain import Average
from draft_svc.methods.base import (
    REASON_CAPACITY,
    REASON_CATCHING_UP,
    REASON_DEADLINE,
    REASON_PAGES,
    REASON_VOCABULARY,
    Draft,
    Method,
    MethodInfo,
    Request,
    RowBlock,
)
from engine.api import Engine, Item, Sampling
from engine.errors import OutOfPages
from engine.kv.pool import PageTable, PoolStats
from engine.kv.prefix import chain_root

# A session fewer tokens behind than this catches up in its next proposal, not before: rounds
# without one then cost next to nothing.
_LAZY_TOKENS = 16
# A forward that catches up keeps the proposals of other sessions waiting no longer than this, but
# takes some tokens in any case.
_PIECE_S = 0.03
_LEAST_TOKENS = 32


@dataclass(slots=True, eq=False)
class DraftModelContext:
    """Committed `ids`, and the ids whose KV `table` holds: `run` agrees with `ids` as far as both
    go, and may go further, into what was proposed last.
    """

    ids: list[int]
    sampling: Sampling
    table: PageTable
    opened_length: int
    run: list[int] = field(default_factory=list)

    @property
    def lag(self) -> int:
        """Ids before the anchor that were not run."""
        return max(len(self.ids) - 1 - len(self.run), 0)

    def rewind(self, length: int) -> None:
        """Forgets the KV from position `length` on."""
        del self.run[length:]
        self.table.truncate(min(self.table.length, len(self.run)))


class DraftModelMethod(Method[DraftModelContext]):
    """`known_ids` is how many ids the tokenizer has: what lies beyond is padding of the vocabulary,
    never proposed. `chunk_tokens` bounds the tokens of one forward that catches up; a slow model
    takes fewer.
    """

    name = "draft_model"

    def __init__(
        self,
        engine: Engine,
        *,
        max_draft_tokens: int,
        tokenizer_hash: str,
        known_ids: int = 0,
        chunk_tokens: int = 128,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        model = engine.info
        self._engine, self._chunk_tokens = engine, chunk_tokens
        self._known_ids = min(known_ids or model.vocab_size, model.vocab_size)
        self._clock, self._step_s, self._token_s = clock, Average(), Average()
        self._behind: dict[DraftModelContext, None] = {}
        self._page_tokens, self._max_length = engine.attention.page_tokens, model.max_length
        self._root = chain_root(self.name, model.fingerprint, model.numerics)
        self._info = MethodInfo(
            method=self.name,
            name=model.name,
            max_draft_tokens=max_draft_tokens,
            max_length_tokens=model.max_length,
            fingerprint=model.fingerprint,
            vocab_size=model.vocab_size,
            tokenizer_hash=tokenizer_hash,
            device=model.device,
            attention=engine.attention,
        )

    @property
    def info(self) -> MethodInfo:
        return self._info

    def open(self, ids: Sequence[int], sampling: Sampling) -> DraftModelContext:
        context = DraftModelContext(list(ids), sampling, self._engine.allocate(0), len(ids))
        table = context.table
        prefix = table.find(self._root, context.ids, min(len(ids) - 1, self._max_length))
        table.adopt(prefix, len(prefix.pages) * self._page_tokens)
        context.run = context.ids[: table.length]
        self._note_lag(context)
        return context

    def update(
        self,
        context: DraftModelContext,
        keep: int,
        tokens: Sequence[int],
        rows: Sequence[RowBlock],
    ) -> None:
        del context.ids[keep:]
        context.ids += tokens
        ids, run = context.ids, context.run
        valid = min(keep, len(run))
        while valid < min(len(run), len(ids)) and run[valid] == ids[valid]:
            valid += 1
        context.rewind(valid)
        self._publish(context)
        self._note_lag(context)

    def _publish(self, context: DraftModelContext) -> None:
        """Lets other sessions begin with what is committed; the anchor's page may be written
        again.
        """
        end = min(len(context.run), len(context.ids) - 1)
        context.table.publish(self._root, context.ids, end)

    def close(self, context: DraftModelContext) -> None:
        self._behind.pop(context, None)
        context.table.free()

    # -- catching up -----------------------------------------------------------------------------

    def _note_lag(self, context: DraftModelContext) -> None:
        if context.lag > _LAZY_TOKENS:
            self._behind[context] = None

    def work(self) -> bool:
        """One chunk for the sessions that are behind, first come, first served."""
        room, share = self._piece_tokens(), []
        for context in list(self._behind):
            count = min(context.lag, room)
            # Without pages, or past the limit, it stays behind until it is asked to propose.
            if count == 0 or self._reserve(context, len(context.ids)):
                del self._behind[context]
                continue
            share.append((context, count))
            room -= count
            if room == 0:
                break
        for context, count in share:
            if context.lag == count:
                del self._behind[context]
        self._run_ids(share)
        return bool(self._behind)

    def _piece_tokens(self) -> int:
        """Tokens of one piece: few on a slow model, `chunk_tokens` at most."""
        fast = int(_PIECE_S / self._token_s.value) if self._token_s.value else self._chunk_tokens
        return min(max(fast, _LEAST_TOKENS), self._chunk_tokens)

    def _run_ids(self, share: Sequence[tuple[DraftModelContext, int]]) -> None:
        """Runs the next `count` ids of each context in one forward."""
        parts = [(c, c.ids[len(c.run) : len(c.run) + count]) for c, count in share]
        items = [
            Item(c.table, ids, len(c.run), 0, c.sampling, exact=False) for c, ids in parts if ids
        ]
        began = self._worked_s()
        if items:
            self._engine.step(items)
            count = sum(len(item.ids) for item in items)
            self._token_s.add((self._worked_s() - began) / count)
        for context, ids in parts:
            context.run += ids
            self._publish(context)

    def _reserve(self, context: DraftModelContext, length: int) -> str:
        """Makes room for `length` positions; why not, or empty."""
        if length > self._max_length:
            return REASON_CAPACITY
        try:
            context.table.reserve(length)
        except OutOfPages:
            return REASON_PAGES
        return ""

    # -- proposing -------------------------------------------------------------------------------

    def propose(self, requests: Sequence[Request[DraftModelContext]]) -> list[Draft]:
        # The smallest lag first: who is far behind must not keep the others waiting.
        order = sorted(range(len(requests)), key=lambda index: requests[index].context.lag)
        room = self._chunk_tokens
        drafts: dict[int, Draft] = {}
        ready: dict[int, Request[DraftModelContext]] = {}
        for index in order:
            context, wanted = requests[index].context, requests[index].k
            context.rewind(min(len(context.run), len(context.ids) - 1))
            k = min(wanted, self._max_length - len(context.ids))
            reason = self._reserve(context, len(context.ids) + max(k, 1))
            if not reason and context.lag > room:
                reason = REASON_CATCHING_UP
                self._behind[context] = None
            if reason:
                drafts[index] = Draft(reason=reason)
            else:
                ready[index] = Request(context, k, requests[index].deadline)
                room -= context.lag
        for index, tokens in zip(ready, self._draw(list(ready.values())), strict=True):
            late = len(tokens) < ready[index].k
            short = REASON_CAPACITY if ready[index].k < requests[index].k else ""
            drafts[index] = self._draft(tokens, REASON_DEADLINE if late else short)
        return [drafts[index] for index in range(len(requests))]

    def _draw(self, requests: Sequence[Request[DraftModelContext]]) -> list[list[int]]:
        """`k` tokens of each session, or as many as there is time for; every forward takes all
        sessions that want more.
        """
        texts = [list(request.context.ids) for request in requests]
        for step in range(max((request.k for request in requests), default=0)):
            began = self._worked_s()
            ready_at = self._clock() + self._step_s.value
            wanting = [
                (request.context, text)
                for request, text in zip(requests, texts, strict=True)
                if request.k > step and request.deadline >= ready_at
            ]
            if not wanting:
                # One slow step must not end speculation for good.
                self._step_s.value *= 0.9
                break
            for (context, text), token in zip(wanting, self._step(wanting), strict=True):
                context.run += text[len(context.run) :]
                text.append(token)
            self._step_s.add(self._worked_s() - began)
        return [text[len(r.context.ids) :] for r, text in zip(requests, texts, strict=True)]

    def _step(self, wanting: Sequence[tuple[DraftModelContext, list[int]]]) -> list[int]:
        """The token that follows each text."""
        items = [
            Item(
                table=context.table,
                ids=text[len(context.run) :],
                start=len(context.run),
                draws=1,
                sampling=context.sampling,
                exact=False,
                context=text,
                prompt_len=context.opened_length,
            )
            for context, text in wanting
        ]
        return [result.tokens[0] for result in self._engine.step(items)]

    def _draft(self, tokens: list[int], reason: str) -> Draft:
        """What may be proposed of `tokens`: nothing from the first padding id on."""
        known = next((i for i, t in enumerate(tokens) if t >= self._known_ids), len(tokens))
        return Draft(
            tuple(tokens[:known]), reason=reason if known == len(tokens) else REASON_VOCABULARY
        )

    # -- the rest --------------------------------------------------------------------------------

    @property
    def once_ns(self) -> int:
        return self._engine.once_ns

    def _worked_s(self) -> float:
        """The clock without what was spent once, so that differences are what steps cost."""
        return self._clock() - self._engine.once_ns / 1e9

    def stats(self) -> PoolStats:
        return self._engine.stats()

    def check_integrity(self) -> None:
        self._engine.check_integrity()

    def warm_up(self) -> None:
        tokens, longest = self._info.max_draft_tokens, self._info.max_length_tokens
        if self._info.device != "cpu":  # kernels are compiled there
            first_runs(self, self._filled, tokens, longest)
        costs = measure(self, self._filled, tokens=tokens, max_length=longest)
        self._info = replace(self._info, costs=costs)

    def _filled(self, sessions: int, length: int) -> list[DraftModelContext]:
        """Contexts that have no beginning in common."""
        greedy, ids = Sampling(temperature=0.0), range(length)
        texts = [[(i + number) % self._known_ids for i in ids] for number in range(sessions)]
        contexts = [self.open(text, greedy) for text in texts]
        while self.work():
            pass
        return contexts
