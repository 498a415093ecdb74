"""The workers of this coordinator: what each said of itself, its link, its load and its pace."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc

from coordinator.acceptance import Acceptance
from coordinator.breaker import Breaker
from coordinator.costs import Costs, from_wire
from coordinator.handshake import check_drafter, check_target, check_worker
from coordinator.links import Link
from coordinator.settings import CoordinatorSettings
from coordinator.standing import Standing
from coordinator.text import TextModel
from coordinator.tokenizer_cache import TokenizerCache
from specwire.errors import Reason, SpecwireError
from specwire.rpc import Message, channel_options
from specwire.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

log = logging.getLogger(__name__)

ItemT = TypeVar("ItemT", bound=Message)
_INFO_TIMEOUT_S = 5.0
# Weight of the newest time in the running mean of rounds.
_WEIGHT = 0.1
ModelKey = tuple[str, str, str]


def _channel(address: str) -> grpc.aio.Channel:
    # Workers are local or in one network: a proxy from the environment is never meant for them.
    options = [*channel_options(link=True), ("grpc.enable_http_proxy", 0)]
    return grpc.aio.insecure_channel(address, options=options)


class Worker(ABC, Generic[ItemT]):
    """One address: the channel, and the link that greets who answers there."""

    def __init__(
        self,
        address: str,
        settings: CoordinatorSettings,
        coordinator: int,
        *,
        stub: Callable[[grpc.aio.Channel], Any],
        frame: Callable[..., Any],
        item: Callable[..., ItemT],
    ) -> None:
        self.address = address
        self._channel = _channel(address)
        self._stub = stub(self._channel)
        self.link: Link[ItemT] = Link(
            address=address,
            coordinator=coordinator,
            lease_ms=settings.lease_ms,
            greet=self._greet,
            open_stream=lambda: self._stub.Link(),
            frame=lambda items: frame(items=items),
            heartbeat=lambda beat: item(heartbeat=beat),
        )

    @abstractmethod
    async def _greet(self) -> int:
        """Asks who answers, checks it, and returns its incarnation."""

    @property
    def busy(self) -> int:
        """Sessions it has, those of other coordinators included."""
        load = self.link.load
        return max(self.link.sessions, load.sessions if load is not None else 0)

    @property
    def waiting(self) -> int:
        """Sessions that wait there, as far as it says."""
        return int(getattr(self.link.load, "waiting", 0))

    async def stop(self) -> None:
        await self.link.stop()
        await self._channel.close()


class TargetWorker(Worker[target_pb2.TargetItem]):
    """One target: its tokenizer, how long its steps take, and whether it takes new sessions."""

    def __init__(
        self, address: str, settings: CoordinatorSettings, coordinator: int, cache: TokenizerCache
    ) -> None:
        super().__init__(
            address,
            settings,
            coordinator,
            stub=target_pb2_grpc.TargetServiceStub,
            frame=target_pb2.TargetServiceLinkRequest,
            item=target_pb2.TargetItem,
        )
        self._cache = cache
        self.info: target_pb2.TargetServiceGetInfoResponse | None = None
        self.text: TextModel | None = None
        # Running mean of a session's verify exchange at the present load; None before the first.
        self.round_s: float | None = None
        self.costs = Costs()
        # It said that it takes no new sessions; until it comes back.
        self.draining = False
        # Sessions placed here that have not ended, those still on their way included.
        self.placed = 0

    async def _greet(self) -> int:
        request = target_pb2.TargetServiceGetInfoRequest()
        info = await self._stub.GetInfo(request, timeout=_INFO_TIMEOUT_S)
        check_target(info)
        known = self.info.model.tokenizer_hash if self.info is not None else None
        if self.text is None or known != info.model.tokenizer_hash:
            document = await self._cache.document(self._stub, info.model.tokenizer_hash)
            self.text = TextModel(document)
        self.info, self.draining = info, False
        self.costs = Costs(from_wire(info.costs, anchor=1))
        return int(info.worker.incarnation)

    @property
    def model_key(self) -> ModelKey | None:
        """What targets of one group have in common: name, weights, tokenizer."""
        if self.info is None:
            return None
        model = self.info.model
        return model.name, model.fingerprint, model.tokenizer_hash

    @property
    def numerics(self) -> str:
        """How it computes: an exact session stays with what is equal in this."""
        return self.info.numerics_fingerprint if self.info is not None else ""

    @property
    def busy(self) -> int:
        return max(super().busy, self.placed)

    @property
    def free_tokens(self) -> int | None:
        """Tokens that fit into its free pages; None: it has not said."""
        load, info = self.link.load, self.info
        if load is None or info is None or not info.page_size_tokens or not load.pages_total:
            return None
        return int(load.pages_free * info.page_size_tokens)

    def note_round(self, tokens: int, context: int, seconds: float) -> None:
        """A step of a session with `tokens` draft tokens took so long, the link's way included."""
        if self.round_s is None:
            self.round_s = seconds
        self.round_s += _WEIGHT * (seconds - self.round_s)
        self.costs.note(tokens, self.busy, context, seconds)


class DraftWorker(Worker[draft_pb2.DraftItem]):
    """One draft service: its drafters, and what is known of each."""

    def __init__(
        self,
        address: str,
        settings: CoordinatorSettings,
        coordinator: int,
        targets: list[TargetWorker],
    ) -> None:
        super().__init__(
            address,
            settings,
            coordinator,
            stub=draft_pb2_grpc.DraftServiceStub,
            frame=draft_pb2.DraftServiceLinkRequest,
            item=draft_pb2.DraftItem,
        )
        self._targets = targets
        self.info: draft_pb2.DraftServiceGetInfoResponse | None = None
        self._settings = settings
        # By method.
        self.standings: dict[str, Standing] = {}
        self._judged: dict[tuple[int, int], tuple[dict[str, Any], dict[str, str]]] = {}

    async def _greet(self) -> int:
        request = draft_pb2.DraftServiceGetInfoRequest()
        info = await self._stub.GetInfo(request, timeout=_INFO_TIMEOUT_S)
        check_worker("draft", info.worker)
        self.info = info
        self.standings = {drafter.method: self._standing(drafter) for drafter in info.drafters}
        self._judged.clear()
        fitting, refused = self.judge_all()
        for text in refused.values():
            log.warning("drafter refused", extra={"address": self.address, "why": text})
        if refused and not fitting:
            raise SpecwireError(Reason.MODEL_MISMATCH, "; ".join(refused.values()))
        return int(info.worker.incarnation)

    def _standing(self, drafter: draft_pb2.DrafterInfo) -> Standing:
        """A new process owes nothing for the old one's lateness; how good it is, is known."""
        settings, known = self._settings, self.standings.get(drafter.method)
        return Standing(
            breaker=Breaker(settings.breaker_lates, settings.breaker_open_ms / 1000),
            costs=Costs(from_wire(drafter.costs, anchor=0)),
            past=known.past if known is not None else Acceptance(),
        )

    def judge(
        self, target: TargetWorker
    ) -> tuple[dict[str, draft_pb2.DrafterInfo], dict[str, str]]:
        """Drafters that fit the target as it is now, and the refusals of the others."""
        if self.info is None or target.info is None:
            return {}, {}
        pair = (target.info.worker.incarnation, self.info.worker.incarnation)
        if pair not in self._judged:
            self._judged[pair] = _judge(self.info, target.info)
        return self._judged[pair]

    def judge_all(self) -> tuple[dict[str, draft_pb2.DrafterInfo], dict[str, str]]:
        """The same over all targets: refused is a drafter that fits none of them."""
        fitting: dict[str, draft_pb2.DrafterInfo] = {}
        refused: dict[str, str] = {}
        for target in self._targets:
            fits, not_fits = self.judge(target)
            fitting.update(fits)
            refused.update(not_fits)
        return fitting, {m: text for m, text in refused.items() if m not in fitting}

    @property
    def push_address(self) -> str:
        return (self.info.push_address if self.info is not None else "") or self.address


def _judge(
    info: draft_pb2.DraftServiceGetInfoResponse, target: target_pb2.TargetServiceGetInfoResponse
) -> tuple[dict[str, draft_pb2.DrafterInfo], dict[str, str]]:
    fitting: dict[str, draft_pb2.DrafterInfo] = {}
    refused: dict[str, str] = {}
    for drafter in info.drafters:
        try:
            check_drafter(target, drafter)
            fitting[drafter.method] = drafter
        except SpecwireError as error:
            refused[drafter.method] = error.message
    return fitting, refused
