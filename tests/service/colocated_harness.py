"""A target with a drafter in its process, on tiny random checkpoints, driven over raw gRPC."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import grpc

from draft_svc import colocated
from engine.kv.pool import PoolStats
from engine.models.dflash import DFlashModel
from engine.runner import NativeEngine
from specwire.rpc import channel_options
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from target_svc.app import Loaded, TargetApp
from target_svc.drafters import find_drafter
from target_svc.engines.native import load_native
from target_svc.settings import TargetSettings
from tests.service.target_harness import Peer, key, open_target, verify

_SESSIONS = count(1000)
FACTORIES = {"dflash": colocated.dflash, "dspark": colocated.dspark}


class Colocated:
    """A running target; `engine` is the native one behind it."""

    def __init__(self, app: TargetApp, engine: NativeEngine, channel: grpc.aio.Channel) -> None:
        self.app, self.engine = app, engine
        self.target = target_pb2_grpc.TargetServiceStub(channel)
        self.draft = draft_pb2_grpc.DraftServiceStub(channel)

    def peer(self) -> Peer:
        return Peer(self.target)

    def stats(self) -> PoolStats:
        return self.engine.stats()

    @property
    def model(self) -> DFlashModel:
        """The draft's."""
        beside = self.engine._beside
        assert beside is not None and isinstance(beside._drafter, colocated.BlockDrafter)
        return beside._drafter._model

    async def idle(self, timeout: float = 5.0) -> None:
        """All sessions gone and all pages free, in time."""
        assert self.app.scheduler is not None
        async with asyncio.timeout(timeout):
            await self.app.scheduler.idle.wait()
            while self.stats().tables:  # noqa: ASYNC110  (the engine tells nobody)
                await asyncio.sleep(0.01)
        self.engine.check_integrity()
        assert self.stats().free == self.stats().total

    async def drafter(self) -> draft_pb2.DrafterInfo:
        info = await self.draft.GetInfo(draft_pb2.DraftServiceGetInfoRequest())
        return info.drafters[0]


@asynccontextmanager
async def colocated_target(model: Path, draft: Path, **settings: Any) -> AsyncIterator[Colocated]:
    """Settings are those of `TargetSettings`; fp32 and plain torch unless they say otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        chosen: dict[str, Any] = {
            "address": f"unix:{folder}/t.sock",
            "model": str(model),
            "colocate": "dflash",
            "draft_checkpoint": str(draft),
            "kernels": "torch",
            "dtype": "float32",
            "draft_dtype": "float32",
            "kv_pages": 64,
            "drain_ms": 0,
            **settings,
        }
        made = TargetSettings(**chosen)
        drafter = find_drafter(made, FACTORIES)
        loaded: list[NativeEngine] = []

        def load(own: TargetSettings) -> Loaded:
            found = partial(load_native, drafter=drafter)(own)
            assert isinstance(found.engine, NativeEngine)
            loaded.append(found.engine)
            return found

        app = TargetApp(made, load, drafter)
        try:
            await app.start()
            options = channel_options(link=True)
            async with grpc.aio.insecure_channel(app.address, options=options) as channel:
                yield Colocated(app, loaded[0], channel)
        finally:
            await app.stop()
            if app._loop_task is not None and not app._loop_task.cancelled():
                app._loop_task.result()
        loaded[0].check_integrity()


@dataclass
class Generated:
    """What a session gave: the output, every proposal, and how many draft tokens were accepted."""

    tokens: list[int] = field(default_factory=list)
    proposals: list[tuple[int, ...]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    accepted: int = 0
    cached: int = 0


async def generate(
    peer: Peer,
    prompt: list[int],
    new_tokens: int,
    k: int,
    *,
    session: int | None = None,
    seed: int = 5,
    temperature: float = 0.0,
    close: bool = True,
    **fields: Any,
) -> Generated:
    """One session with K = `k` in every round; 0: opened without the drafter."""
    at, out = key(session or next(_SESSIONS)), Generated()
    if k:
        fields["colocated"] = target_pb2.ColocatedDraft(method="", then_propose=k)
    sampling = common_pb2.Sampling(temperature=temperature, seed=seed)
    await peer.send(
        open_target(prompt, new_tokens, at, sampling=sampling, ignore_eos=True, **fields)
    )
    length, step = len(prompt), 0
    while True:
        verdict = await peer.verdict()
        assert verdict.step_id == step and verdict.base_len == length
        out.tokens += verdict.tokens
        out.accepted += verdict.accepted
        out.cached += verdict.cached_tokens
        length = verdict.new_len
        if verdict.finish:
            assert not verdict.HasField("proposal")
            break
        assert verdict.HasField("proposal") == (k > 0)
        ids: tuple[int, ...] = ()
        if k:
            proposal = verdict.proposal
            assert (proposal.step_id, proposal.base_len) == (step, length)
            ids = tuple(proposal.ids)
            out.proposals.append(ids)
            out.reasons.append(proposal.reason)
        step += 1
        await peer.send(verify(step, length, ids, at, then_propose=k))
    if close:
        await peer.send(target_pb2.CloseSession(key=at))
        assert (await peer.reply()).HasField("closed")
    return out
