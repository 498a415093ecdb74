"""A small autoregressive model with the target's tokenizer.

It reads ids only: what is committed is run through the model once, in chunks, and a proposal is `k`
single steps that all sessions take together. Tokens are drawn as the target draws them, with the
same noise at the same index, so the two agree as often as their logits do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from draft_svc.costs import measure
from draft_svc.gain import Average
from draft_svc.methods.base import (
    REASON_CAPACITY,
    REASON_CATCHING_UP,
    REASON_DEADLINE,
    REASON_VOCABULARY,
    Draft,
    Method,
    MethodInfo,
    Request,
    RowBlock,
)
from draft_svc.methods.draft_model_context import CatchUp, DraftModelContext
from engine.api import Engine, Item, Sampling, WarmUp, never
from engine.kv.pool import PoolStats
from engine.kv.prefix import chain_root


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
        warm_sessions: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        model = engine.info
        self._engine, self._chunk_tokens = engine, chunk_tokens
        self._warm_sessions = warm_sessions
        self._known_ids = min(known_ids or model.vocab_size, model.vocab_size)
        self._clock, self._step_s = clock, Average()
        self._page_tokens, self._max_length = engine.attention.page_tokens, model.max_length
        self._root = chain_root(self.name, model.fingerprint, model.numerics)
        self._behind = CatchUp(engine, self._root, chunk_tokens, clock)
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
        self._behind.note(context)
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
        self._behind.publish(context)
        self._behind.note(context)

    def close(self, context: DraftModelContext) -> None:
        self._behind.remove(context)
        context.table.free()

    def work(self) -> bool:
        return self._behind.work()

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
            reason = self._behind.reserve(context, len(context.ids) + max(k, 1))
            if not reason and context.lag > room:
                reason = REASON_CATCHING_UP
                self._behind.add(context)
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
            began = self._behind.worked_s()
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
            self._step_s.add(self._behind.worked_s() - began)
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

    @property
    def once_ns(self) -> int:
        return self._engine.once_ns

    def stats(self) -> PoolStats:
        return self._engine.stats()

    def check_integrity(self) -> None:
        self._engine.check_integrity()

    def warm_up(self, stopped: Callable[[], bool] = never) -> None:
        tokens, longest = self._info.max_draft_tokens, self._info.max_length_tokens
        if self._warm_sessions and self._info.device != "cpu":  # kernels are compiled there
            # Its blocks are single tokens; what is committed comes as a prompt does.
            self._engine.warm_up(WarmUp(self._warm_sessions, widest=1, stopped=stopped))
        if stopped():
            return
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
