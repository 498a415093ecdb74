"""The workers of this coordinator (static endpoints) and which drafter a request gets."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import grpc

from coordinator.breaker import Breaker
from coordinator.handshake import check_drafter, check_target, check_worker
from coordinator.links import Link
from coordinator.settings import CoordinatorSettings
from coordinator.text import TextModel
from coordinator.tokenizer_cache import TokenizerCache
from specwire.errors import Reason, SpecwireError
from specwire.rpc import channel_options, new_incarnation
from specwire.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

log = logging.getLogger(__name__)

PLAIN = "plain"
_INFO_TIMEOUT_S = 5.0
# Weight of the newest step in the running mean of step times.
_STEP_WEIGHT = 0.1


def _channel(address: str) -> grpc.aio.Channel:
    # Workers are local or in one network: a proxy from the environment is never meant for them.
    options = [*channel_options(link=True), ("grpc.enable_http_proxy", 0)]
    return grpc.aio.insecure_channel(address, options=options)


class TargetWorker:
    """The target: what it said, its tokenizer, and how long its steps take."""

    def __init__(
        self, settings: CoordinatorSettings, coordinator: int, cache: TokenizerCache
    ) -> None:
        self._channel = _channel(settings.target)
        self._stub = target_pb2_grpc.TargetServiceStub(self._channel)
        self._cache = cache
        self.info: target_pb2.TargetServiceGetInfoResponse | None = None
        self.text: TextModel | None = None
        # Running mean of what a step takes in the target; None before the first.
        self.step_s: float | None = None
        self.link: Link[target_pb2.TargetItem] = Link(
            address=settings.target,
            coordinator=coordinator,
            lease_ms=settings.lease_ms,
            greet=self._greet,
            open_stream=lambda: self._stub.Link(),
            frame=lambda items: target_pb2.TargetServiceLinkRequest(items=items),
            heartbeat=lambda beat: target_pb2.TargetItem(heartbeat=beat),
        )

    async def _greet(self) -> int:
        request = target_pb2.TargetServiceGetInfoRequest()
        info = await self._stub.GetInfo(request, timeout=_INFO_TIMEOUT_S)
        check_target(info)
        known = self.info.model.tokenizer_hash if self.info is not None else None
        if self.text is None or known != info.model.tokenizer_hash:
            document = await self._cache.document(self._stub, info.model.tokenizer_hash)
            self.text = TextModel(document)
        self.info = info
        return info.worker.incarnation

    @property
    def identity(self) -> tuple[str, str]:
        """What must stay the same for a session to go on: the model, and how it computes."""
        if self.info is None:
            return "", ""
        return self.info.model.fingerprint, self.info.numerics_fingerprint

    def note_step(self, seconds: float) -> None:
        if self.step_s is None:
            self.step_s = seconds
        self.step_s += _STEP_WEIGHT * (seconds - self.step_s)

    async def stop(self) -> None:
        await self.link.stop()
        await self._channel.close()


class DraftWorker:
    """One draft service: drafters that fit the target, and why the others do not."""

    def __init__(
        self, address: str, settings: CoordinatorSettings, coordinator: int, target: TargetWorker
    ) -> None:
        self._channel = _channel(address)
        self._stub = draft_pb2_grpc.DraftServiceStub(self._channel)
        self._target = target
        self.address = address
        self.info: draft_pb2.DraftServiceGetInfoResponse | None = None
        self.breaker = Breaker(settings.breaker_lates, settings.breaker_open_ms / 1000)
        self.link: Link[draft_pb2.DraftItem] = Link(
            address=address,
            coordinator=coordinator,
            lease_ms=settings.lease_ms,
            greet=self._greet,
            open_stream=lambda: self._stub.Link(),
            frame=lambda items: draft_pb2.DraftServiceLinkRequest(items=items),
            heartbeat=lambda beat: draft_pb2.DraftItem(heartbeat=beat),
        )

    async def _greet(self) -> int:
        request = draft_pb2.DraftServiceGetInfoRequest()
        info = await self._stub.GetInfo(request, timeout=_INFO_TIMEOUT_S)
        check_worker("draft", info.worker)
        self.info = info
        # A new process owes nothing for the old one's lateness.
        self.breaker.success()
        fitting, refused = self.judge()
        for text in refused.values():
            log.warning("drafter refused", extra={"address": self.address, "why": text})
        if refused and not fitting:
            raise SpecwireError(Reason.MODEL_MISMATCH, "; ".join(refused.values()))
        return info.worker.incarnation

    def judge(self) -> tuple[dict[str, draft_pb2.DrafterInfo], dict[str, str]]:
        """Drafters that fit the target as it is now, and the refusals of the others."""
        fitting: dict[str, draft_pb2.DrafterInfo] = {}
        refused: dict[str, str] = {}
        if self.info is None or self._target.info is None:
            return fitting, refused
        for drafter in self.info.drafters:
            try:
                check_drafter(self._target.info, drafter)
                fitting[drafter.method] = drafter
            except SpecwireError as error:
                refused[drafter.method] = error.message
        return fitting, refused

    @property
    def push_address(self) -> str:
        return (self.info.push_address if self.info is not None else "") or self.address

    async def stop(self) -> None:
        await self.link.stop()
        await self._channel.close()


@dataclass(frozen=True, slots=True)
class Choice:
    """The drafter of one session."""

    worker: DraftWorker
    drafter: draft_pb2.DrafterInfo


class Fleet:
    """All workers. Create it inside the running loop."""

    def __init__(self, settings: CoordinatorSettings, cache: TokenizerCache | None = None) -> None:
        self.settings = settings
        self.incarnation = new_incarnation()
        self.target = TargetWorker(settings, self.incarnation, cache or TokenizerCache())
        self.drafts = [
            DraftWorker(address, settings, self.incarnation, self.target)
            for address in settings.draft
        ]

    def start(self) -> None:
        self.target.link.start()
        for draft in self.drafts:
            draft.link.start()

    async def stop(self) -> None:
        for draft in self.drafts:
            await draft.stop()
        await self.target.stop()

    def methods(self) -> list[str]:
        """What requests may name: plain, and each drafter that fits and was seen."""
        found = {method for draft in self.drafts for method in draft.judge()[0]}
        return [PLAIN, *sorted(found)]

    def default_method(self) -> str:
        known = self.methods()
        if self.settings.default_method in known:
            return self.settings.default_method
        for draft in self.drafts:
            for method, drafter in draft.judge()[0].items():
                if drafter.is_default:
                    return method
        return "ngram" if "ngram" in known else PLAIN

    def choose(self, method: str) -> Choice | None:
        """The drafter for a method: one that is up before one that is down; None for plain."""
        if method == PLAIN:
            return None
        found = [
            Choice(draft, drafters[method])
            for draft in self.drafts
            if method in (drafters := draft.judge()[0])
        ]
        if not found:
            accepted = ", ".join(self.methods()) + self._refusals(method)
            raise SpecwireError.field("speculation.method", method, accepted, Reason.METHOD_UNKNOWN)
        return max(found, key=lambda c: (c.worker.link.ready, not c.worker.breaker.open))

    def _refusals(self, method: str) -> str:
        texts = [text for draft in self.drafts if (text := draft.judge()[1].get(method))]
        return f" ({'; '.join(texts)})" if texts else ""
