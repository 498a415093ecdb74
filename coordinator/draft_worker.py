"""One draft service as the coordinator knows it: its drafters, and which targets they fit."""

from __future__ import annotations

import logging

from coordinator.drafters import SEPARATE, Drafters
from coordinator.handshake import check_worker
from coordinator.settings import CoordinatorSettings
from coordinator.standing import Standing
from coordinator.target_worker import TargetWorker
from coordinator.worker import INFO_TIMEOUT_S, Worker
from specwire.errors import Reason, SpecwireError
from specwire.rpc import ASKS_MINOR
from specwire.v1 import draft_pb2, draft_pb2_grpc

log = logging.getLogger(__name__)


class DraftWorker(Worker[draft_pb2.DraftItem]):
    """One draft service: its drafters, and what is known of each."""

    role = "draft"

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
        self._targets, self._settings = targets, settings
        self.drafters: Drafters | None = None

    @property
    def info(self) -> draft_pb2.DraftServiceGetInfoResponse | None:
        return self.drafters.info if self.drafters is not None else None

    @property
    def standings(self) -> dict[str, Standing]:
        """By method."""
        return self.drafters.standings if self.drafters is not None else {}

    async def _greet(self) -> int:
        request = draft_pb2.DraftServiceGetInfoRequest()
        info = await self._stub.GetInfo(request, timeout=INFO_TIMEOUT_S)
        check_worker("draft", info.worker)
        self.drafters = Drafters(info, SEPARATE, self._settings, self.drafters)
        fitting, refused = self.judge_all()
        for text in refused.values():
            log.warning("drafter refused", extra={"address": self.address, "why": text})
        if refused and not fitting:
            raise SpecwireError(Reason.MODEL_MISMATCH, "; ".join(refused.values()))
        return int(info.worker.incarnation)

    def judge(
        self, target: TargetWorker
    ) -> tuple[dict[str, draft_pb2.DrafterInfo], dict[str, str]]:
        """Drafters that fit the target as it is now, and the refusals of the others."""
        if self.drafters is None or target.info is None:
            return {}, {}
        if (home := self._home()) is not None:
            text = f"co-located with the target at {home}, whose sessions have it without a link"
            return {}, dict.fromkeys(self.standings, text)
        return self.drafters.judge(target.info)

    def _home(self) -> str | None:
        """The target in whose process these drafters are, given as a separate draft by mistake."""
        assert self.drafters is not None
        mine = self.drafters.incarnation
        homes = [t.address for t in self._targets if t.info and t.info.worker.incarnation == mine]
        return homes[0] if homes else None

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
    def answers_targets(self) -> bool:
        """Whether a target may ask it on the stream of its rows."""
        return self.info is not None and self.info.worker.protocol_minor >= ASKS_MINOR

    @property
    def push_address(self) -> str:
        return (self.info.push_address if self.info is not None else "") or self.address
