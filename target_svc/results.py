"""What an engine's answer does to a session: committed tokens, pages, rows, the verdict."""

from __future__ import annotations

import time

from engine.api import Item, ItemResult, TokenLogprobs
from specwire.v1 import common_pb2, target_pb2
from target_svc.outcome import trim
from target_svc.rows import rows_of
from target_svc.sessions import Key, Session, Step


def end_chunk(session: Session, item: Item, result: ItemResult) -> None:
    """A prompt chunk with more to come, run for the first time or again."""
    assert session.table is not None and session.computed is not None
    if session.opening:
        session.computed = max(session.computed, session.table.length)
        _send_rows(session, 0, item.start, result)


def keep_scores(session: Session, item: Item, result: ItemResult) -> None:
    """Log probabilities of the prompt, chunk by chunk; a chunk that runs again has none to add."""
    known = len(session.prompt_scores) - item.start
    session.prompt_scores += result.prompt_logprobs[max(0, known) :]


def commit(
    session: Session, step: Step, result: ItemResult, proposal: common_pb2.Proposal | None
) -> target_pb2.Verdict:
    """Keeps what stop ids and limits allow. The rows follow with `end_step`; a proposal goes with
    the verdict that it continues."""
    base, opening = len(session.ids), session.opening
    kept = trim(result.tokens, result.accepted, session.spec.stop_ids, session.remaining)
    session.ids.extend(kept.tokens)
    new_len = len(session.ids)
    assert session.table is not None
    session.table.truncate(new_len - 1)
    session.computed = new_len - 1
    rows_start = session.rows_start if opening else base - 1
    session.finished = bool(kept.finish)
    session.done_step = step.step_id
    # Filled in place, and only with what there is: every round waits for it.
    verdict = session.verdict = target_pb2.Verdict(
        step_id=step.step_id, base_len=base, new_len=new_len, width=step.width
    )
    _put_key(verdict.key, session.key)
    verdict.tokens.extend(kept.tokens)
    verdict.accepted, verdict.finish = kept.accepted, kept.finish
    _put_timings(verdict.timings, step)
    if session.sink is not None:
        verdict.rows_start, verdict.rows_count = rows_start, new_len - 1 - rows_start
    if session.spec.margins:
        verdict.margins.extend(result.margins[: len(kept.tokens)])
    if result.logprobs:
        verdict.logprobs.extend(map(_scored, result.logprobs[: len(kept.tokens)]))
    if opening:
        verdict.prompt_logprobs.extend(map(_scored, session.prompt_scores))
        verdict.cached_tokens = session.cached
    if proposal is not None:
        _put_key(proposal.key, session.key)
        proposal.step_id, proposal.base_len = step.step_id, new_len
        verdict.proposal.CopyFrom(proposal)
    session.prompt_scores.clear()
    return verdict


def _put_key(at: common_pb2.SessionKey, key: Key) -> None:
    at.coordinator, at.session_id, at.generation = key


def _scored(scored: TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        token_id=scored.token,
        logprob=scored.logprob,
        rank=scored.rank,
        top=[common_pb2.TopLogprob(token_id=i, logprob=value) for i, value in scored.top],
    )


def end_step(session: Session, step_id: int, item: Item, result: ItemResult) -> None:
    """Sends the rows of a committed step.

    After the verdict, which has the longer way: through the coordinator, to the draft's Advance.
    """
    # Behind a stop the engine's rows are valid, but not part of the text: rows end at new_len - 1.
    _send_rows(session, step_id, item.start, result, end=len(session.ids) - 1)


def free_step(session: Session, after: Step, draft: list[int]) -> Step:
    """The next step of a free run, unasked: one token, and those of `draft` that are right."""
    return Step(
        step_id=after.step_id + 1,
        base_len=len(session.ids),
        draft=draft,
        free_run=after.free_run - 1,
        deadline=after.deadline,
        received=time.perf_counter(),
        asked=False,
        then_propose=after.then_propose,
        drafts_ahead=after.drafts_ahead,
    )


def _send_rows(
    session: Session, step_id: int, start: int, result: ItemResult, end: int | None = None
) -> None:
    """Keeps and pushes the rows of [start, end), except those that the draft already has."""
    if session.sink is None:
        return
    rows = rows_of(result)
    if rows is None:
        return
    skip = max(0, session.rows_start - start) if step_id == 0 else 0
    wanted = rows[skip : None if end is None else end - start]
    if len(wanted):
        session.history.add(start + skip, wanted)
        session.sink.push(step_id, start + skip, wanted)


def _put_timings(at: common_pb2.Timings, step: Step) -> None:
    started = step.received if step.started is None else step.started
    at.queue_ns = int(max(0.0, started - step.received) * 1e9)
    at.compute_ns = int(step.compute_s * 1e9)
    at.once_ns = step.once_ns
