"""How `GetInfo` tells of a worker: its place, state and load, what it runs on, what it drafts."""

from __future__ import annotations

from typing import Any

from coordinator.draft_worker import DraftWorker
from coordinator.drafters import COLOCATED, SEPARATE
from coordinator.placement import Group
from coordinator.target_worker import TargetWorker
from coordinator.worker import Worker
from specwire.v1 import draft_pb2, generate_pb2

_Worker = generate_pb2.GenerationServiceGetInfoResponse.Worker


def _worker(role: str, worker: Worker[Any]) -> _Worker:
    link, load = worker.link, worker.link.load
    found = _Worker(
        role=role,
        address=link.address,
        state=link.state,
        reason=link.reason,
        sessions=worker.busy,
        waiting=worker.waiting,
    )
    if load is not None:
        found.pages_free, found.pages_total = load.pages_free, load.pages_total
    return found


def target_view(target: TargetWorker, first: Group | None) -> _Worker:
    worker = _worker("target", target)
    if target.info is not None:
        worker.attention.CopyFrom(target.info.attention)
        worker.device = target.info.worker.device
        name, fingerprint, tokenizer = target.model_key or ("", "", "")
        if first is not None and target not in first.targets:
            said = f"serves another model than the first target: {name}, fingerprint {fingerprint}"
            said += f", tokenizer {tokenizer[:16]}"
            worker.reason = "; ".join(filter(None, [worker.reason, said]))
    if target.draining:
        worker.reason = "; ".join(filter(None, [worker.reason, "takes no new sessions"]))
    return worker


def beside_view(target: TargetWorker) -> _Worker:
    """The drafters in a target's process; they are up when it is, and their sessions are its."""
    worker, inside = _worker("draft", target), target.colocated
    assert inside is not None and target.info is not None
    worker.placement = COLOCATED
    worker.device = inside.info.worker.device or target.info.worker.device
    return _described(worker, *inside.judge(target.info))


def draft_view(draft: DraftWorker) -> _Worker:
    worker = _worker("draft", draft)
    worker.placement = SEPARATE
    if draft.info is not None:
        worker.device = draft.info.worker.device
    return _described(worker, *draft.judge_all())


def _described(
    worker: _Worker, fitting: dict[str, draft_pb2.DrafterInfo], refused: dict[str, str]
) -> _Worker:
    """With what it drafts, or why it does not."""
    texts = list(dict.fromkeys(refused.values()))
    if texts:
        worker.reason = "; ".join([*filter(None, [worker.reason]), *texts])
        if not fitting:
            worker.state, worker.reason = "refused", "; ".join(texts)
    worker.methods.extend(fitting)
    reports = [d.attention for d in fitting.values() if d.attention.chosen]
    if reports:
        worker.attention.CopyFrom(reports[0])
    return worker
