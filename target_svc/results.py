"""What an engine's answer does to a session: committed tokens, pages, the step after it."""

from __future__ import annotations

import time

from engine.api import Item, ItemResult
from target_svc.outcome import Outcome, trim
from target_svc.sessions import Session, Step


def end_chunk(session: Session) -> None:
    """A prompt chunk with more to come, run for the first time or again."""
    assert session.table is not None and session.computed is not None
    if session.opening:
        session.computed = max(session.computed, session.table.length)


def keep_scores(session: Session, item: Item, result: ItemResult) -> None:
    """Log probabilities of the prompt, chunk by chunk; a chunk that runs again has none to add."""
    known = len(session.prompt_scores) - item.start
    session.prompt_scores += result.prompt_logprobs[max(0, known) :]


def commit(session: Session, step: Step, result: ItemResult) -> Outcome:
    """Keeps what stop ids and limits allow."""
    spec, ids, table = session.spec, session.ids, session.table
    kept = trim(result.tokens, result.accepted, spec.stop_ids, spec.limit_len - len(ids))
    ids += kept.tokens
    assert table is not None
    session.computed = computed = len(ids) - 1
    table.truncate(computed)
    session.finished = bool(kept.finish)
    session.done_step, session.answer = step.step_id, None
    return kept


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
        draft_wait_us=after.draft_wait_us,
    )
