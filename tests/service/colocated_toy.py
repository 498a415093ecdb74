"""A toy target with a scripted drafter in its process: both services at one address, one
incarnation, one exchange a round. It needs no engine: tokens are `toy_engine.next_token`."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from specwire.errors import Reason, SpecwireError
from specwire.rpc import decode_ids, new_incarnation, server_options
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from target_svc.info import info_response
from target_svc.outcome import usable_draft
from target_svc.settings import TargetSettings
from tests.service.coordinator_harness import document
from tests.service.toy_engine import VOCAB, ToyEngine, continuation, next_token

# What the drafter says with a verdict: gets the verdict, the ids committed by then, and how many
# tokens are asked for.
Script = Callable[[target_pb2.Verdict, list[int], int], common_pb2.Proposal | None]
Outbox = asyncio.Queue[target_pb2.TargetReply | None]
MAX_DRAFT = 7


def perfect(verdict: target_pb2.Verdict, ids: list[int], k: int) -> common_pb2.Proposal:
    return proposal(verdict, continuation(ids, k))


def proposal(verdict: target_pb2.Verdict, ids: list[int], **changes: Any) -> common_pb2.Proposal:
    fields: dict[str, Any] = {
        "key": verdict.key,
        "step_id": verdict.step_id,
        "base_len": verdict.new_len,
        "timings": common_pb2.Timings(compute_ns=1_000),
    }
    return common_pb2.Proposal(**{**fields, "ids": ids, **changes})


@dataclass
class _Session:
    open: target_pb2.OpenTarget
    ids: list[int]
    emitted: int = 0
    running: asyncio.Task[None] | None = None
    drafts: bool = field(init=False)

    def __post_init__(self) -> None:
        self.drafts = self.open.HasField("colocated")


class ColocatedToy(target_pb2_grpc.TargetServiceServicer):
    def __init__(self, script: Script = perfect, step_s: float = 0.0, **drafter: Any) -> None:
        self.script, self.step_s = script, step_s
        self.drafters = [
            draft_pb2.DrafterInfo(
                **{"method": "toy", "max_draft_tokens": MAX_DRAFT, "is_default": True, **drafter}
            )
        ]
        # What the draft role says it is, where that is not the truth.
        self.false_incarnation = 0
        self.broken_info: grpc.StatusCode | None = None
        # Reason for which an open with a drafter is refused.
        self.refuse: Reason | None = None
        # Reason for which every step is refused.
        self.away: Reason | None = None
        # Holds every step; `entered` tells that one is held.
        self.gate, self.entered = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.sessions: dict[tuple[int, int], _Session] = {}
        self.opens: list[target_pb2.OpenTarget] = []
        self.verifies: list[target_pb2.Verify] = []
        # Steps that have begun, those that nobody asked for included.
        self.begun = 0
        self.draft_links = 0
        self.server: grpc.aio.Server | None = None
        self.incarnation, self.address = 0, ""
        # Where the coordinator broke the contract.
        self.broken: list[str] = []

    async def start(self) -> None:
        """A new process's worth of target, at `address`."""
        self.incarnation = new_incarnation()
        self.sessions.clear()
        settings = TargetSettings(address=self.address, drain_ms=0)
        digest = hashlib.sha256(document()).hexdigest()
        self.info = info_response(ToyEngine(), settings, self.incarnation, digest)
        self.server = grpc.aio.server(options=server_options(link=True))
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, self.server)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(_Drafts(self), self.server)
        self.server.add_insecure_port(self.address)
        await self.server.start()

    async def stop(self) -> None:
        """At once, in the middle of whatever runs."""
        for session in self.sessions.values():
            self._cut(session)
        if self.server is not None:
            await self.server.stop(0)
        self.sessions.clear()

    # -- TargetService ---------------------------------------------------------------------------

    async def GetInfo(self, request: Any, context: Any) -> target_pb2.TargetServiceGetInfoResponse:
        return self.info

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        digest = self.info.model.tokenizer_hash
        yield target_pb2.GetTokenizerResponse(hash=digest, chunk=document())

    async def Link(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        out: Outbox = asyncio.Queue()

        async def read() -> None:
            async for frame in request_iterator:
                for item in frame.items:
                    self._handle(item, out)
            out.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (reply := await out.get()) is not None:
                replies = [reply]
                while not out.empty():
                    if (more := out.get_nowait()) is None:
                        out.put_nowait(None)
                        break
                    replies.append(more)
                yield target_pb2.TargetServiceLinkResponse(
                    incarnation=self.incarnation, replies=replies
                )
        finally:
            reader.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await reader

    def _handle(self, item: target_pb2.TargetItem, out: Outbox) -> None:
        kind = item.WhichOneof("item")
        if kind == "open":
            self._open(item.open, out)
        elif kind == "verify":
            self._verify(item.verify, out)
        elif kind == "close":
            self._forget(item.close.key)
            closed = target_pb2.TargetClosed(key=item.close.key)
            out.put_nowait(target_pb2.TargetReply(closed=closed))
        elif kind == "heartbeat":
            unknown = [k for k in item.heartbeat.sessions if _name(k) not in self.sessions]
            ack = target_pb2.HeartbeatAck(unknown=unknown)
            out.put_nowait(target_pb2.TargetReply(heartbeat_ack=ack))

    def _open(self, item: target_pb2.OpenTarget, out: Outbox) -> None:
        self._expect(not (item.HasField("colocated") and item.HasField("push_to")), "push")
        self.opens.append(item)
        for name in [n for n in self.sessions if n[0] == item.key.session_id]:
            self._cut(self.sessions.pop(name))
        if self.refuse is not None and item.HasField("colocated"):
            _refuse(item.key, 0, self.refuse, out)
            return
        session = self.sessions[_name(item.key)] = _Session(item, decode_ids(item.ids))
        work = self._steps(session, 0, [], item.free_run, item.colocated.then_propose, out)
        session.running = asyncio.create_task(work)

    def _verify(self, item: target_pb2.Verify, out: Outbox) -> None:
        self.verifies.append(item)
        session = self.sessions.get(_name(item.key))
        if session is None:
            _refuse(item.key, item.step_id, Reason.SESSION_UNKNOWN, out)
            return
        if self.away is not None:
            _refuse(item.key, item.step_id, self.away, out)
            return
        most = session.open.colocated.max_draft_tokens
        self._expect(session.running is None or session.running.done(), "two steps at once")
        self._expect(item.base_len == len(session.ids), "another length")
        self._expect(session.drafts or not item.then_propose, "no drafter was opened")
        self._expect(item.then_propose <= most, "more than the open allows")
        draft, then = list(item.draft_ids), item.then_propose
        ahead = item.drafts_ahead
        self._expect(not ahead or bool(draft and then and item.free_run), "nothing to go on with")
        work = self._steps(session, item.step_id, draft, item.free_run, then, out, ahead)
        session.running = asyncio.create_task(work)

    async def _steps(
        self,
        session: _Session,
        step_id: int,
        draft: list[int],
        free_run: int,
        then_propose: int,
        out: Outbox,
        ahead: bool = False,
    ) -> None:
        for step in range(step_id, step_id + 1 + free_run):
            self.begun += 1
            self.entered.set()
            await self.gate.wait()
            await asyncio.sleep(self.step_s)
            verdict = self._run(session, step, draft)
            draft = []
            over = verdict.finish != common_pb2.FINISH_REASON_UNSPECIFIED
            if (ahead or step == step_id + free_run) and then_propose and not over:
                most = session.open.max_new_tokens - session.emitted - 1
                k = min(then_propose, most) if ahead else then_propose
                found = self.script(verdict, list(session.ids), k)
                if found is not None:
                    await asyncio.sleep(found.timings.compute_ns / 1e9)
                    verdict.proposal.CopyFrom(found)
                    draft = usable_draft(found.ids, VOCAB, k)[0]
            out.put_nowait(target_pb2.TargetReply(verdict=verdict))
            if over:
                return

    def _run(self, session: _Session, step: int, draft: list[int]) -> target_pb2.Verdict:
        sampling, most = session.open.sampling, session.open.max_new_tokens
        self._expect(len(draft) < most - session.emitted, "more than the session may still have")
        seed, base = sampling.seed + 7919 * sampling.choice, len(session.ids)
        tokens: list[int] = []
        for proposed in [*draft, -1]:
            tokens.append(next_token(session.ids, seed))
            session.ids.append(tokens[-1])
            if tokens[-1] != proposed:
                break
        session.emitted += len(tokens)
        done = session.emitted >= most
        return target_pb2.Verdict(
            key=session.open.key,
            step_id=step,
            base_len=base,
            accepted=len(tokens) - 1,
            tokens=tokens,
            new_len=len(session.ids),
            finish=common_pb2.FINISH_REASON_LENGTH if done else 0,
            timings=common_pb2.Timings(compute_ns=int(self.step_s * 1e9)),
        )

    def _expect(self, kept: bool, rule: str) -> None:
        if not kept:
            self.broken.append(rule)

    def _forget(self, key: common_pb2.SessionKey) -> None:
        session = self.sessions.pop(_name(key), None)
        if session is not None:
            self._cut(session)

    def _cut(self, session: _Session) -> None:
        if session.running is not None:
            session.running.cancel()


class _Drafts(draft_pb2_grpc.DraftServiceServicer):
    """The draft role of the same process: it tells of its drafters, and takes no sessions."""

    def __init__(self, toy: ColocatedToy) -> None:
        self._toy = toy

    async def GetInfo(self, request: Any, context: Any) -> draft_pb2.DraftServiceGetInfoResponse:
        toy = self._toy
        if toy.broken_info is not None:
            await context.abort(toy.broken_info, "scripted")
        incarnation = toy.false_incarnation or toy.incarnation
        worker = common_pb2.WorkerInfo(protocol_major=1, incarnation=incarnation, device="cpu")
        return draft_pb2.DraftServiceGetInfoResponse(worker=worker, drafters=toy.drafters)

    async def Link(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        self._toy.draft_links += 1
        async for frame in request_iterator:
            for item in frame.items:
                if item.HasField("open"):
                    error = SpecwireError(Reason.UNSUPPORTED, "co-located").to_item()
                    refused = draft_pb2.DraftRefused(key=item.open.key, error=error)
                    yield draft_pb2.DraftServiceLinkResponse(
                        incarnation=self._toy.incarnation,
                        replies=[draft_pb2.DraftReply(refused=refused)],
                    )


def _refuse(key: common_pb2.SessionKey, step_id: int, reason: Reason, out: Outbox) -> None:
    error = common_pb2.ItemError(reason=reason, message="scripted")
    refused = target_pb2.TargetRefused(key=key, step_id=step_id, error=error)
    out.put_nowait(target_pb2.TargetReply(refused=refused))


def _name(key: common_pb2.SessionKey) -> tuple[int, int]:
    return key.session_id, key.generation
