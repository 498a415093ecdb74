"""The prompts of `specwire bench`, generated once in each mode."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Unpack

from coordinator.bench_modes import Mode, not_there, rotated
from coordinator.bench_prompts import Prompt
from coordinator.bench_stats import PromptRun
from coordinator.drafters import COLOCATED
from specwire.client import AsyncStream, Delta, Finished, GenerateOptions
from specwire.errors import Reason, SpecwireError

WARM_UP = Prompt(-1, "warm-up", ({"role": "user", "content": "Count from one to ten."},))
WARM_UP_TOKENS = 24


@dataclass(frozen=True)
class BenchOptions:
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    exactness: str = "exact"
    num_speculative_tokens: int | None = None


class Streams(Protocol):
    """What the bench needs of a client; tests put another in its place."""

    def stream(self, **options: Unpack[GenerateOptions]) -> AsyncStream: ...


@dataclass(frozen=True)
class Clients:
    """Who is asked: a deployment, and for co-located drafters, by method, those where they are if
    that is elsewhere."""

    first: Streams
    colocated: Mapping[str, Streams] = field(default_factory=dict)

    def of(self, mode: Mode) -> Streams:
        inside = self.colocated.get(mode.method) if mode.placement == COLOCATED else None
        return inside or self.first


async def run_modes(
    clients: Clients,
    prompts: Sequence[Prompt],
    modes: Sequence[Mode],
    options: BenchOptions,
    progress: Callable[[str], None],
) -> dict[str, list[PromptRun]]:
    runs: dict[str, list[PromptRun]] = {mode.label: [] for mode in modes}
    for mode in modes:
        try:
            await measure(clients.of(mode), WARM_UP, mode, options, WARM_UP_TOKENS)
        except SpecwireError as error:
            if error.reason is Reason.METHOD_UNKNOWN:
                raise not_there(mode, error.metadata.get("accepted", "")) from error
            raise
    for turn, prompt in enumerate(prompts):
        for mode in rotated(modes, turn):
            run = await measure(clients.of(mode), prompt, mode, options, options.max_tokens)
            runs[mode.label].append(run)
        progress(f"{turn + 1}/{len(prompts)} prompts")
    if "plain" in runs:
        await add_margins(clients, prompts, modes, options, runs)
    return runs


async def add_margins(
    clients: Clients,
    prompts: Sequence[Prompt],
    modes: Sequence[Mode],
    options: BenchOptions,
    runs: dict[str, list[PromptRun]],
) -> None:
    """Runs `plain` again where a mode differs from it: margins cost time, so none are measured."""
    plain = next(mode for mode in modes if mode.label == "plain")
    for at, reference in enumerate(runs["plain"]):
        if all(found[at].token_ids == reference.token_ids for found in runs.values()):
            continue
        again = await measure(
            clients.of(plain), prompts[at], plain, options, options.max_tokens, return_margins=True
        )
        if again.token_ids == reference.token_ids:
            runs["plain"][at] = replace(reference, margins=again.margins)


async def measure(
    client: Streams,
    prompt: Prompt,
    mode: Mode,
    options: BenchOptions,
    max_tokens: int,
    return_margins: bool = False,
) -> PromptRun:
    ids: list[int] = []
    margins: list[float] = []
    first_at = first_tokens = 0
    finished: Finished | None = None
    plain = mode.method == "plain"  # takes no number of draft tokens
    began = time.perf_counter_ns()
    stream = client.stream(
        messages=prompt.messages,
        max_tokens=max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        method=mode.request,
        exactness=mode.exactness,
        num_speculative_tokens=None if plain else options.num_speculative_tokens,
        return_token_ids=True,
        return_margins=return_margins,
    )
    async with stream:
        async for event in stream:
            if isinstance(event, Finished):
                finished = event
            elif isinstance(event, Delta):
                ids += event.token_ids
                margins += event.margins
                if not first_at and ids:
                    first_at, first_tokens = time.perf_counter_ns(), len(ids)
    ended = time.perf_counter_ns()
    assert finished is not None  # the client raises when the final message is missing
    record = finished.acceptance
    return PromptRun(
        index=prompt.index,
        category=prompt.category,
        token_ids=tuple(ids),
        ttft_ms=((first_at or ended) - began) / 1e6,
        total_ms=(ended - began) / 1e6,
        first_tokens=first_tokens,
        rounds=record.rounds,
        margins=tuple(margins),
        drafted_by_position=record.drafted_by_position,
        accepted_by_position=record.accepted_by_position,
        phase_ms=dict(record.phase_ms),
        drafted=record.per_step_drafted,
        outside_us=record.per_step_outside_us,
    )
