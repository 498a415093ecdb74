"""A coordinator between a toy target and a scripted draft: one process, UNIX sockets."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from tokenizers import Tokenizer, decoders, models

from coordinator.host import CoordinatorHost
from coordinator.settings import CoordinatorSettings
from coordinator.tokenizer_cache import TokenizerCache
from specwire.client import AsyncClient
from specwire.generation import Generation
from specwire.rpc import channel_options, decode_ids, new_incarnation, server_options
from specwire.v1 import (
    common_pb2,
    draft_pb2,
    draft_pb2_grpc,
    generate_pb2_grpc,
    target_pb2,
)
from target_svc.app import Loaded, TargetApp
from target_svc.settings import TargetSettings
from tests.service.toy_engine import HIDDEN, VOCAB, ToyEngine, continuation

PROMPT = [5, 6, 7, 8]
TAPS = (1, 3)
Reply = draft_pb2.DraftReply
# What a scripted draft answers to an Advance: gets itself, the item, and the ids known after it.
Script = Callable[["ScriptedDraft", draft_pb2.Advance, list[int]], list[Reply]]


def document() -> bytes:
    """Each token i is the word `wi` and a space, so that text shows the tokens."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i} ": i for i in range(VOCAB)}, unk_token="w0 "))
    tokenizer.decoder = decoders.Fuse()
    fields = {"tokenizer": json.loads(tokenizer.to_str()), "chat_template": "", "special": {}}
    return json.dumps(fields).encode()


def proposal(item: draft_pb2.Advance, length: int, ids: list[int], **changes: Any) -> Reply:
    fields: dict[str, Any] = {"key": item.key, "step_id": item.step_id, "base_len": length}
    return Reply(proposal=common_pb2.Proposal(**{**fields, "ids": ids, **changes}))


def perfect(draft: ScriptedDraft, item: draft_pb2.Advance, ids: list[int]) -> list[Reply]:
    return [proposal(item, len(ids), continuation(ids, item.k, draft.seed))]


class ScriptedDraft(draft_pb2_grpc.DraftServiceServicer):
    """Keeps ids as the contract says; what it proposes is the script's business."""

    def __init__(self, script: Script = perfect, **drafter: Any) -> None:
        self.script, self.seed = script, 0
        # How long a frame takes, per item that asks for tokens: a draft that works in steps.
        self.ask_s = 0.0
        self.drafter = draft_pb2.DrafterInfo(
            **{"method": "toy", "max_draft_tokens": 7, "is_default": True, **drafter}
        )
        # Minor protocol version: of one that targets do not ask, unless a test says so.
        self.minor = 0
        self.incarnation = new_incarnation()
        # Sent instead of the true one in frames, where set.
        self.false_incarnation = 0
        self.silent_open = False
        self.sessions: dict[tuple[int, int], list[int]] = {}
        self.opens: list[draft_pb2.OpenDraft] = []
        # What coordinators told and asked, and what targets did.
        self.advances: list[draft_pb2.Advance] = []
        self.asks: list[draft_pb2.Advance] = []
        self.closes: list[Any] = []
        self.row_bytes: dict[tuple[int, int], int] = defaultdict(int)
        self.server: grpc.aio.Server | None = None
        self.address = ""

    async def start(self, address: str) -> None:
        self.incarnation = new_incarnation()
        self.sessions.clear()
        self.server = grpc.aio.server(options=server_options(link=True))
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, self.server)
        self.server.add_insecure_port(address)
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)

    async def GetInfo(self, request: Any, context: Any) -> draft_pb2.DraftServiceGetInfoResponse:
        worker = common_pb2.WorkerInfo(
            protocol_major=1, protocol_minor=self.minor, incarnation=self.incarnation
        )
        return draft_pb2.DraftServiceGetInfoResponse(worker=worker, drafters=[self.drafter])

    async def Link(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for frame in request_iterator:
            await asyncio.sleep(self.ask_s * sum(item.advance.k > 0 for item in frame.items))
            replies = [reply for item in frame.items for reply in self._handle(item)]
            if replies:
                yield draft_pb2.DraftServiceLinkResponse(
                    incarnation=self.false_incarnation or self.incarnation, replies=replies
                )

    async def PushFeatures(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for frame in request_iterator:
            for chunk in frame.chunks:
                self.row_bytes[chunk.key.session_id, chunk.step_id] += len(chunk.rows)
            yield draft_pb2.PushFeaturesResponse(
                replies=[reply for ask in frame.asks for reply in self._asked(ask)],
                acks=[
                    draft_pb2.FeatureAck(key=c.key, step_id=c.step_id, credit_bytes=len(c.rows))
                    for c in frame.chunks
                ],
            )

    def _handle(self, item: draft_pb2.DraftItem) -> list[Reply]:
        kind = item.WhichOneof("item")
        if kind == "open":
            self.opens.append(item.open)
            key = item.open.key
            for older in range(key.generation):
                self.sessions.pop((key.session_id, older), None)
            self.sessions[_name(item.open.key)] = decode_ids(item.open.ids)
            if self.silent_open:
                return []
            return [Reply(opened=draft_pb2.DraftOpened(key=item.open.key))]
        if kind == "advance":
            return self._advance(item.advance)
        if kind == "close":
            self.closes.append(item.close.key)
            self.sessions.pop(_name(item.close.key), None)
            return [Reply(closed=draft_pb2.DraftClosed(key=item.close.key))]
        unknown = [k for k in item.heartbeat.sessions if _name(k) not in self.sessions]
        return [Reply(heartbeat_ack=target_pb2.HeartbeatAck(unknown=unknown))]

    def _advance(self, item: draft_pb2.Advance) -> list[Reply]:
        self.advances.append(item)
        return self._told(item)

    def _asked(self, item: draft_pb2.Advance) -> list[Reply]:
        self.asks.append(item)
        return self._told(item)

    def _told(self, item: draft_pb2.Advance) -> list[Reply]:
        ids = self.sessions.get(_name(item.key))
        if ids is None:
            return [refusal(item, "SESSION_UNKNOWN")]
        assert item.base_len <= len(ids), "a gap was left"
        ids[item.base_len :] = item.tokens
        return self.script(self, item, list(ids))


def refusal(item: draft_pb2.Advance, reason: str) -> Reply:
    error = common_pb2.ItemError(reason=reason, message="scripted")
    return Reply(refused=draft_pb2.DraftRefused(key=item.key, step_id=item.step_id, error=error))


def _name(key: common_pb2.SessionKey) -> tuple[int, int]:
    return key.session_id, key.generation


def row_drafter(**changes: Any) -> dict[str, Any]:
    """Fields of a drafter that reads the toy target's rows."""
    row_format = {
        "encoding": common_pb2.ROW_ENCODING_TAPS,
        "convention": common_pb2.TAP_CONVENTION_OUTPUT_OF_LAYER,
        "tap_ids": TAPS,
        "dtype": common_pb2.D_TYPE_BFLOAT16,
        "width": len(TAPS) * HIDDEN,
        **changes,
    }
    return {"needs_rows": True, "row_format": common_pb2.RowFormat(**row_format)}


class World:
    """Target, draft and coordinator; each may be stopped and started again at its address."""

    def __init__(self, folder: Path, draft: ScriptedDraft | None, engine: dict[str, Any]) -> None:
        self.folder, self.draft, self._engine_options = folder, draft, engine
        self.target_address = f"unix:{folder}/t"
        self.draft_address = f"unix:{folder}/d"

    async def start_target(self, **engine: Any) -> None:
        self.engine = ToyEngine(**{**self._engine_options, **engine})
        settings = TargetSettings(address=self.target_address, drain_ms=0, reflection=False)
        self.app = TargetApp(settings, lambda _: Loaded(self.engine, document()))
        await self.app.start()

    async def start_draft(self) -> None:
        assert self.draft is not None
        await self.draft.start(self.draft_address)

    async def wait_ready(self) -> None:
        fleet = self.host.fleet
        for worker in (*fleet.targets, *fleet.drafts):
            assert await worker.link.wait_ready(10)

    async def generate(self, **options: Any) -> Generation:
        defaults: dict[str, Any] = {
            "token_ids": PROMPT,
            "max_tokens": 40,
            "temperature": 0.0,
            "seed": 0,
            "return_token_ids": True,
        }
        if "prompt" in options or "messages" in options:
            del defaults["token_ids"]
        return await self.client.generate(**{**defaults, **options})

    async def until_idle(self, timeout: float = 3.0) -> None:
        """Both workers know no session any more, and the target's pages are free."""
        async with asyncio.timeout(timeout):
            await self.app.scheduler.idle.wait()
            while self.engine.stats().tables or (self.draft and self.draft.sessions):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        self.engine.check_integrity()


@asynccontextmanager
async def world(
    draft: ScriptedDraft | None = None, engine: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[World]:
    with tempfile.TemporaryDirectory() as name:
        made = World(Path(name), draft, engine or {})
        await made.start_target()
        if draft is not None:
            await made.start_draft()
            settings.setdefault("draft", (made.draft_address,))
        # Tests that name K mean it for every round.
        settings.setdefault("adaptive_k", "num_speculative_tokens" not in settings)
        fields = {"drain_ms": 0, "reflection": False, "proposal_wait_min_ms": 500, **settings}
        chosen = CoordinatorSettings(address=f"unix:{name}/c", target=made.target_address, **fields)
        try:
            async with CoordinatorHost(chosen, TokenizerCache(made.folder)) as made.host:
                await made.wait_ready()
                async with AsyncClient(made.host.address) as made.client:
                    yield made
        finally:
            if draft is not None:
                await draft.stop()
            made.engine.gate.set()
            await made.app.stop()


@asynccontextmanager
async def public_stub(made: World) -> AsyncIterator[Any]:
    """The public API without the client library."""
    options = channel_options(link=False)
    async with grpc.aio.insecure_channel(made.host.address, options=options) as channel:
        yield generate_pb2_grpc.GenerationServiceStub(channel)
