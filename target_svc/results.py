"""What an engine's answer does to a session: committed tokens, pages, rows, the verdict."""

from __future__ import annotations

import time

from engine.api import Item, ItemResult, TokenLogprobs
from specwire.v1 import common_pb2, target_pb2
from target_svc.decode import key_to_wire
from target_svc.outcome import trim
from target_svc.rows import rows_of
from target_svc.sessions import Session, Step


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
    session.verdict = target_pb2.Verdict(
        key=key_to_wire(session.key),
        step_id=step.step_id,
        base_len=base,
        accepted=kept.accepted,
        tokens=kept.tokens,
        new_len=new_len,
        finish=kept.finish,
        timings=_timings(step),
        margins=result.margins[: len(kept.tokens)] if session.spec.margins else (),
        rows_start=rows_start if session.sink is not None else 0,
        rows_count=new_len - 1 - rows_start if session.sink is not None else 0,
        width=step.width,
        logprobs=map(_scored, result.logprobs[: len(kept.tokens)]),
        prompt_logprobs=map(_scored, session.prompt_scores) if opening else (),
        cached_tokens=session.cached if opening else 0,
    )
    if proposal is not None:
        proposal.key.CopyFrom(session.verdict.key)
        proposal.step_id, proposal.base_len = step.step_id, new_len
        session.verdict.proposal.CopyFrom(proposal)
    session.prompt_scores.clear()
    return session.verdict


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


def free_step(session: Session, after: Step) -> Step:
    """The next step of a free run: one token, unasked."""
    return Step(
        step_id=after.step_id + 1,
        base_len=len(session.ids),
        draft=[],
        free_run=after.free_run - 1,
        deadline=after.deadline,
        received=time.perf_counter(),
        asked=False,
        then_propose=after.then_propose,
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


def _timings(step: Step) -> common_pb2.Timings:
    started = step.received if step.started is None else step.started
    return common_pb2.Timings(
        queue_ns=int(max(0.0, started - step.received) * 1e9),
        compute_ns=int(step.compute_s * 1e9),
    )
