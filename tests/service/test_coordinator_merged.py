"""Deltas that hold several rounds: what a slow client's session has read at once says the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from coordinator import session as loop
from coordinator.session import Session
from engine.api import Item, ItemResult, nothing
from specwire.client import AsyncClient, Delta, Event, Finished, Generation
from specwire.errors import Reason, SpecwireError
from specwire.generation import collect
from tests.service.colocated_toy import ColocatedToy
from tests.service.coordinator_harness import PROMPT, World, world
from tests.service.fleet_harness import fleet_world, until
from tests.service.test_coordinator_colocated import rough as rough_beside
from tests.service.test_coordinator_run_ahead import AskedDraft, rough
from tests.service.toy_engine import continuation

TOKENS = 60
ROUNDS = continuation(PROMPT, TOKENS)
SLOW_S = 0.03

CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 7},
    "scores": {"logprobs": 2, "return_margins": True},
    "no ids": {"return_token_ids": False},
    "one token": {"max_tokens": 1},
    "a limit": {"max_tokens": 23},
    "stop string": {"stop": [f"w{ROUNDS[29]} "]},
    "stop string of two": {"stop": [f"w{ROUNDS[28]} w{ROUNDS[29]} "], "include_stop": True},
    "no stop string": {"stop": ["w1 w1 w1 "]},
    "stop token": {"stop_token_ids": [ROUNDS[31]]},
    "stop token shown": {"stop_token_ids": [ROUNDS[31]], "include_stop": True},
}


@asynccontextmanager
async def services(kind: str, **options: Any) -> AsyncIterator[AsyncClient]:
    """A client of a coordinator whose target runs ahead: alone, with a drafter inside, or with a
    draft service."""
    if kind == "colocated":
        toy = ColocatedToy(rough_beside)
        async with fleet_world(infos=[toy], num_speculative_tokens=3, **options) as fleet:
            yield fleet.client
        return
    draft = None
    if kind == "separate":
        draft = AskedDraft(rough)
        draft.seed = options.pop("seed", 0)
        options["num_speculative_tokens"] = 3
    async with world(draft, **options) as made:
        yield made.client


async def events(client: AsyncClient, **asked: Any) -> list[Event]:
    defaults = {"token_ids": PROMPT, "max_tokens": TOKENS, "temperature": 0.0, "seed": 0}
    stream = client.stream(**{"return_token_ids": True, **defaults, **asked})
    async with stream:
        return [event async for event in stream]


def slowed(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    """Clients take their time, and deltas hold so many rounds at most."""
    run = Session.run

    async def slow(self: Session, deliver: Any) -> Any:
        async def late(delta: Any) -> None:
            await asyncio.sleep(SLOW_S if together > 1 else 0)
            await deliver(delta)

        return await run(self, late)

    monkeypatch.setattr(Session, "run", slow)
    monkeypatch.setattr(loop, "_TOGETHER", together)


def same(one: Generation, two: Generation) -> None:
    for name in (
        "text",
        "token_ids",
        "margins",
        "logprobs",
        "finish_reason",
        "stop_string",
        "stop_token_id",
        "usage",
        "sampling",
        "choice",
    ):
        assert getattr(one, name) == getattr(two, name), name
    first, second = one.acceptance, two.acceptance
    for name in (
        "rounds",
        "draft_tokens",
        "accepted_tokens",
        "tau",
        "per_step_drafted",
        "per_step_accepted",
        "drafted_by_position",
        "accepted_by_source",
        "fallbacks",
    ):
        assert getattr(first, name) == getattr(second, name), name
    assert len(first.per_step_outside_us) == len(second.per_step_outside_us)


@pytest.mark.parametrize("kind", ["plain", "colocated", "separate"])
async def test_an_answer_in_few_deltas_is_the_same_answer(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, list[Event]]] = []
    for together in (1, 32):
        with monkeypatch.context() as patch:
            slowed(patch, together)
            async with services(kind) as client:
                cases = {n: c for n, c in CASES.items() if kind == "plain" or n != "sampled"}
                # Toys without an engine do not know of scores and stop tokens.
                if kind == "colocated":
                    cases = {n: c for n, c in cases.items() if n != "scores" and "token" not in n}
                found = [await events(client, **case) for case in cases.values()]
            made.append(dict(zip(cases, found, strict=True)))
    single, merged = made
    for name, found in merged.items():
        same(collect(single[name]), collect(found))
        assert len(found) <= len(single[name]), name
    assert len(merged["greedy"]) < len(single["greedy"]) / 2


async def test_what_the_draft_proposed_is_told_of_in_every_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slowed(monkeypatch, 32)
    async with services("colocated") as client:
        for stop in ([], ["w1 w1 w1 "]):
            found = await events(client, stop=stop)
            deltas = [event for event in found if isinstance(event, Delta)]
            assert any(delta.later_accepted for delta in deltas)
            counts = [span.count for delta in deltas for span in delta.accepted]
            told = collect(found).acceptance.per_step_accepted
            assert counts == [accepted for accepted in told if accepted]
            for delta in deltas:
                for span in delta.accepted:
                    tokens = delta.token_ids[span.start : span.start + span.count]
                    text = delta.text[span.start_char : span.start_char + span.chars]
                    if not stop:  # text that may begin a stop string is held back
                        assert text == "".join(f"w{token} " for token in tokens)


async def test_choices_keep_their_rounds_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    single, merged = [], []
    for together, into in ((1, single), (32, merged)):
        with monkeypatch.context() as patch:
            slowed(patch, together)
            async with services("plain") as client:
                into += await events(client, n=3, temperature=0.9, seed=3, logprobs=1)
    for one, two in zip(collect(single).choices, collect(merged).choices, strict=True):
        same(one, two)
        assert two.text == "".join(f"w{token} " for token in two.token_ids)
    assert len(merged) < len(single)


async def test_a_delta_has_no_more_rounds_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    slowed(monkeypatch, 5)
    async with services("plain") as client:
        found = [event for event in await events(client) if isinstance(event, Delta)]
        assert max(len(delta.token_ids) for delta in found) == 5


async def test_what_comes_before_a_refusal_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine fails in the middle of a run ahead: the tokens before reach the client."""
    slowed(monkeypatch, 32)
    async with world(None) as made:
        fail_behind(made, 20)
        asked = {"max_tokens": TOKENS, "temperature": 0.0, "seed": 0, "return_token_ids": True}
        stream = made.client.stream(token_ids=PROMPT, **asked)
        got: list[int] = []
        with pytest.raises(SpecwireError) as caught:
            async for event in stream:
                assert isinstance(event, Delta)
                got += event.token_ids
        assert caught.value.reason is Reason.INTERNAL
        assert got == ROUNDS[:20]
        await made.until_idle()


def fail_behind(made: World, steps: int) -> None:
    step, ran = made.engine.step, [0]

    def counted(items: Sequence[Item], launched: Callable[[], None] = nothing) -> list[ItemResult]:
        ran[0] += 1
        if ran[0] > steps:
            raise RuntimeError("toy failure")
        return step(items, launched)

    made.engine.step = counted  # type: ignore[method-assign]


async def test_a_client_that_goes_while_verdicts_wait_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slowed(monkeypatch, 32)
    async with world(None, {"step_s": 0.001}) as made:
        streams = [
            made.client.stream(token_ids=[i, 9], max_tokens=400, temperature=0.0) for i in range(12)
        ]

        async def begin(stream: Any) -> None:
            async for _ in stream:
                return

        await asyncio.gather(*map(begin, streams))
        for stream in streams:
            stream.cancel()
        await made.until_idle()
        await until(lambda: not made.host.fleet.targets[0].link.sessions)
        # And those that come behind them find their turn.
        found = await events(made.client)
        assert isinstance(found[-1], Finished) and list(collect(found).token_ids) == ROUNDS
