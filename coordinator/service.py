"""The public API: admission and errors here, the loop in session.py."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from typing import Any

from coordinator.activity import Activity
from coordinator.drafters import PLAIN
from coordinator.metrics import Metrics
from coordinator.placement import Fleet, Group
from coordinator.session import Deliver, Session
from coordinator.spec import SessionSpec
from coordinator.validation import check, is_long, prompt_ids
from coordinator.worker_view import beside_view, draft_view, target_view
from specwire.errors import Reason, SpecwireError
from specwire.rpc import PROTOCOL_MAJOR, PROTOCOL_MINOR
from specwire.sampling import MAX_CHOICES
from specwire.v1 import common_pb2, generate_pb2, generate_pb2_grpc

SERVICE_NAME = "specwire.v1.GenerationService"
_DRAINED_S = 0.02


class GenerationServicer(generate_pb2_grpc.GenerationServiceServicer):
    def __init__(self, fleet: Fleet, metrics: Metrics) -> None:
        self._fleet, self._metrics = fleet, metrics
        self.activity = Activity()
        self._numbers = itertools.count(1)
        self.sessions: dict[int, Session] = {}
        self._draining = False
        # Of every call to Generate that runs: with an end once this coordinator is to end.
        self._calls: set[asyncio.Timeout] = set()
        # One thread: the tokens of a text of 4 MiB take some hundred MB until they are counted.
        self._long_texts = ThreadPoolExecutor(1, thread_name_prefix="long-texts")

    # The interceptor takes a coroutine that writes; the generated type expects a generator.
    async def Generate(  # type: ignore[override]
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> None:
        call = asyncio.timeout(None)
        try:
            async with call:
                self._calls.add(call)
                await self._generate(request, context)
        except TimeoutError:
            if not call.expired():
                raise
            text = "this coordinator is shutting down: the rest of the answer is missing"
            raise SpecwireError(Reason.DRAINING, text) from None
        finally:
            self._calls.discard(call)

    async def drain(self, grace_s: float) -> None:
        """Refuses what comes, lets what runs end within `grace_s`, and ends the rest: each of them
        with DRAINING. Returns when no call is left."""
        self._draining = True
        end = asyncio.get_running_loop().time() + grace_s
        for call in self._calls:
            call.reschedule(end)
        while True:
            if not self._calls:
                return
            await asyncio.sleep(_DRAINED_S)

    async def _generate(self, request: generate_pb2.GenerateRequest, context: Any) -> None:
        lives = self._sessions(*await self._admit(request, context))
        self.sessions |= lives

        # A call that was cut while nothing of ours awaited is closed all the same.
        def cut(_: Any) -> None:
            for live in lives.values():
                live.close()

        context.add_done_callback(cut)
        try:
            await self._answers(lives, context)
        finally:
            for number in lives:
                del self.sessions[number]

    def _sessions(self, group: Group, spec: SessionSpec) -> dict[int, Session]:
        """One per choice; what belongs to the prompt is the first one's business."""
        text = group.text
        first = Session(group, next(self._numbers), spec, text)
        lives = {first.session_id: first}
        for choice in range(1, spec.n):
            sampling = common_pb2.Sampling()
            sampling.CopyFrom(spec.answer.sampling)
            sampling.choice = choice
            answer = replace(spec.answer, sampling=sampling, prompt_logprobs=None)
            number = next(self._numbers)
            own = replace(spec, answer=answer)
            lives[number] = Session(group, number, own, text, parent=first)
        return lives

    async def _answers(self, lives: dict[int, Session], context: Any) -> None:
        """All choices at once. The first that fails ends the others, and the call."""
        if len(lives) == 1:
            (live,) = lives.values()
            await self._answer(live, context)
            return
        writing = asyncio.Lock()  # a call takes one message at a time

        async def answer(choice: int, live: Session) -> None:
            async def deliver(delta: generate_pb2.Delta) -> None:
                async with writing:
                    await context.write(generate_pb2.GenerateResponse(delta=delta, choice=choice))

            finished = await self._run(live, deliver)
            async with writing:
                await context.write(generate_pb2.GenerateResponse(finished=finished, choice=choice))

        # Not a TaskGroup: before Python 3.13 one that fails leaves its caller marked as cancelled.
        tasks = [asyncio.create_task(answer(*pair)) for pair in enumerate(lives.values())]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _answer(self, live: Session, context: Any) -> None:
        """The only choice: nobody else writes."""
        write, response = context.write, generate_pb2.GenerateResponse

        def deliver(delta: generate_pb2.Delta) -> Awaitable[None]:
            written: Awaitable[None] = write(response(delta=delta))
            return written

        await write(response(finished=await self._run(live, deliver)))

    async def _run(self, live: Session, deliver: Deliver) -> generate_pb2.Finished:
        outcome = "cancelled"
        self._metrics.sessions.inc()
        self.activity.began(live)
        try:
            finished = await live.run(deliver)
            outcome = "ok"
            self._metrics.finished(finished)
            return finished
        except SpecwireError as error:
            outcome = error.reason.lower()
            raise
        finally:
            self._metrics.sessions.dec()
            self.activity.ended(live, outcome == "ok")
            for cause, rounds in live.record.fallbacks.items():
                self._metrics.fell_back(cause, rounds)
            if outcome != "ok":
                self._metrics.failed(live.record.method, outcome)

    async def _admit(
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> tuple[Group, SessionSpec]:
        left_s = context.time_remaining()
        loop = asyncio.get_running_loop()
        deadline = None if left_s is None else loop.time() + left_s
        group, prompt = self._room(request), None
        if is_long(request):
            text, info = group.text, group.target.info
            assert info is not None
            long_texts = self._long_texts
            found = await loop.run_in_executor(long_texts, prompt_ids, request, text, info.model)
            group = self._room(request)
            prompt = found if group.text is text else None
        metadata_of = dict(context.invocation_metadata() or ())
        traceparent = str(metadata_of.get("traceparent", ""))[:64]
        return group, check(request, group, group.text, deadline, traceparent, prompt)

    def _room(self, request: generate_pb2.GenerateRequest) -> Group:
        """Who serves the request, if it is taken now."""
        settings = self._fleet.settings
        if self._draining:
            raise SpecwireError(Reason.DRAINING, "this coordinator is shutting down")
        group = self._fleet.group(request.model)
        # Whether `n` can be at all is checked later, with the rest.
        wanted = min(max(1, request.n), MAX_CHOICES)
        if wanted > settings.max_sessions:  # waiting would not help
            accepted = f"1 to {settings.max_sessions}, the answers that may run here at once"
            raise SpecwireError.field("n", request.n, accepted)
        if len(self.sessions) + wanted > settings.max_sessions:
            text = f"{len(self.sessions)} of {settings.max_sessions} sessions run already"
            limit = {"limit": str(settings.max_sessions)}
            raise SpecwireError(Reason.QUEUE_FULL, text, limit)
        return group

    async def GetInfo(
        self, request: generate_pb2.GenerationServiceGetInfoRequest, context: Any
    ) -> generate_pb2.GenerationServiceGetInfoResponse:
        fleet = self._fleet
        groups = fleet.groups()
        first = groups[0] if groups else None
        info = first.target.info if first is not None else None
        return generate_pb2.GenerationServiceGetInfoResponse(
            version=metadata.version("specwire"),
            protocol_major=PROTOCOL_MAJOR,
            protocol_minor=PROTOCOL_MINOR,
            model=info.model if info is not None else None,
            workers=[
                *(target_view(target, first) for target in fleet.targets),
                *(beside_view(target) for target in fleet.targets if target.colocated is not None),
                *map(draft_view, fleet.drafts),
            ],
            methods=first.offers.methods() if first is not None else [PLAIN],
            default_method=first.offers.default_method() if first is not None else PLAIN,
            default_exactness=info.default_exactness if info is not None else None,
            contract_levels=info.contract_levels if info is not None else (),
            # Zero: chosen for each round.
            default_num_speculative_tokens=0
            if fleet.settings.adaptive_k
            else fleet.settings.num_speculative_tokens,
        )
