"""One target as the coordinator knows it: what it said of itself, its load and its pace."""

from __future__ import annotations

import logging

import grpc

from coordinator.costs import from_wire
from coordinator.drafters import COLOCATED, SEPARATE, Drafters
from coordinator.handshake import check_target
from coordinator.round_costs import RoundCosts
from coordinator.settings import CoordinatorSettings
from coordinator.text import TextModel
from coordinator.tokenizer_cache import TokenizerCache
from coordinator.turns import Turns
from coordinator.worker import INFO_TIMEOUT_S, Worker
from coordinator.yields import Yields
from specwire.rpc import ASKS_MINOR
from specwire.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

log = logging.getLogger(__name__)

# Weight of the newest time in the running mean of rounds.
_WEIGHT = 0.1
ModelKey = tuple[str, str, str]


class TargetWorker(Worker[target_pb2.TargetItem]):
    """One target: its tokenizer, how long its steps take, and whether it takes new sessions."""

    role = "target"

    def __init__(
        self,
        address: str,
        settings: CoordinatorSettings,
        coordinator: int,
        cache: TokenizerCache,
        turns: Turns | None = None,
    ) -> None:
        super().__init__(
            address,
            settings,
            coordinator,
            stub=target_pb2_grpc.TargetServiceStub,
            frame=target_pb2.TargetServiceLinkRequest,
            item=target_pb2.TargetItem,
            turns=turns,
        )
        self._cache, self._settings = cache, settings
        # Drafters in the target's own process.
        self.colocated: Drafters | None = None
        self.info: target_pb2.TargetServiceGetInfoResponse | None = None
        # Of it, what every round asks for; 0 before the first greeting.
        self.most_draft_tokens = self.max_length = self.vocab_size = 0
        # It can ask a draft service itself; and it goes on with a drafter beside it, as far as is
        # known: an older one takes the question and brings nothing.
        self.asks_drafts, self.drafts_ahead = False, True
        self.text: TextModel | None = None
        # Running mean of a session's verify exchange at the present load; None before the first.
        self.round_s: float | None = None
        self.costs = RoundCosts()
        # What its sessions yield together with each drafter, by method and placement.
        self._yields: dict[tuple[str, str], Yields] = {}
        # It said that it takes no new sessions; until it comes back.
        self.draining = False
        # Sessions placed here that have not ended, those still on their way included.
        self.placed = 0

    async def _greet(self) -> int:
        request = target_pb2.TargetServiceGetInfoRequest()
        info = await self._stub.GetInfo(request, timeout=INFO_TIMEOUT_S)
        check_target(info)
        known = self.info.model.tokenizer_hash if self.info is not None else None
        if self.text is None or known != info.model.tokenizer_hash:
            document = await self._cache.document(self._stub, info.model.tokenizer_hash)
            self.text = TextModel(document)
        self.info, self.draining = info, False
        self.most_draft_tokens = int(info.max_draft_tokens)
        self.max_length = int(info.model.max_length_tokens)
        self.vocab_size = int(info.model.vocab_size)
        self.asks_drafts = info.worker.protocol_minor >= ASKS_MINOR
        self.drafts_ahead = True
        self.costs, self._yields = RoundCosts(from_wire(info.costs, anchor=1)), {}
        self.colocated = await self._drafters_inside(info.worker.incarnation)
        return int(info.worker.incarnation)

    async def _drafters_inside(self, incarnation: int) -> Drafters | None:
        """One process that hosts both roles has one incarnation. Nothing else proves it: at an
        address, or on a host, there may be several."""
        stub = draft_pb2_grpc.DraftServiceStub(self._channel)
        try:
            info = await stub.GetInfo(
                draft_pb2.DraftServiceGetInfoRequest(), timeout=INFO_TIMEOUT_S
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                text = f"its draft role says {error.code().name}"
                log.warning("not co-located", extra={"address": self.address, "why": text})
            return None
        if info.worker.incarnation != incarnation:
            text = "another process answers as the draft there"
            log.warning("not co-located", extra={"address": self.address, "why": text})
            return None
        return Drafters(info, COLOCATED, self._settings, self.colocated)

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
        link = self.link
        return max(self.placed, link.sessions, link.load_sessions)

    @property
    def free_tokens(self) -> int | None:
        """Tokens that fit into its free pages; None: it has not said."""
        load, info = self.link.load, self.info
        if load is None or info is None or not info.page_size_tokens or not load.pages_total:
            return None
        return int(load.pages_free * info.page_size_tokens)

    def note_round(self, seconds: float) -> None:
        """A step of a session took so long, the link's way included."""
        mean = seconds if self.round_s is None else self.round_s
        self.round_s = mean + _WEIGHT * (seconds - mean)

    def note_cost(self, tokens: int, context: int, seconds: float, ahead: bool) -> None:
        """So long took a step with `tokens` draft tokens that was asked for, or came unasked
        (`ahead`)."""
        self.costs.note(tokens, self.busy, context, seconds, ahead)

    def yields(self, method: str, placement: str) -> Yields:
        """Of all its sessions, with this drafter and without."""
        found = self._yields.get((method, placement))
        if found is None:
            found = self._yields[method, placement] = Yields(placement == SEPARATE)
        return found

    def note_tokens(
        self, now: float, tokens: int, asked: Yields | None, drafts: bool, follows: bool
    ) -> None:
        """A verdict at `now` (seconds of `time.perf_counter`) brought `tokens` to a session, which
        was allowed or forbidden to draft where it `asked`, and followed by its drafter or not."""
        if self._yields:
            busy = self.busy
            for each in self._yields.values():
                each.note(now, tokens, busy, drafts if each is asked else None, follows)
