"""`specwire bench`: modes compared prompt by prompt, so that drift hits all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Protocol, Unpack

import typer
import uvloop

from coordinator import bench_report as report_of
from coordinator import options as opt
from coordinator.bench_modes import Mode, pairs, parse_modes, placed, rotated, wants_colocated
from coordinator.bench_prompts import Prompt, load_prompts
from coordinator.bench_stats import PromptRun, ratios, summarize
from coordinator.drafters import COLOCATED
from coordinator.local import LocalOptions
from specwire.client import AsyncClient, AsyncStream, Delta, Finished, GenerateOptions
from specwire.info import WorkerState

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


async def run_modes(
    client: Streams,
    prompts: Sequence[Prompt],
    modes: Sequence[Mode],
    options: BenchOptions,
    progress: Callable[[str], None],
) -> dict[str, list[PromptRun]]:
    runs: dict[str, list[PromptRun]] = {mode.label: [] for mode in modes}
    for mode in modes:
        await measure(client, WARM_UP, mode, options, WARM_UP_TOKENS)
    for turn, prompt in enumerate(prompts):
        for mode in rotated(modes, turn):
            run = await measure(client, prompt, mode, options, options.max_tokens)
            runs[mode.label].append(run)
        progress(f"{turn + 1}/{len(prompts)} prompts")
    if "plain" in runs:
        await add_margins(client, prompts, modes, options, runs)
    return runs


async def add_margins(
    client: Streams,
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
            client, prompts[at], plain, options, options.max_tokens, return_margins=True
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


async def compare(
    address: str,
    prompts_file: Path,
    prompts: Sequence[Prompt],
    modes: Sequence[Mode],
    options: BenchOptions,
    *,
    colocate: bool = False,
) -> report_of.Report:
    """The JSON report. `colocate`: drafters that are in both places are measured in both."""
    async with AsyncClient(address) as client:
        server = await client.info()
        modes = placed(modes, server, both=colocate)
        runs = await run_modes(client, prompts, modes, options, opt.say)
    settings = {
        **asdict(options),
        "num_speculative_tokens": options.num_speculative_tokens
        or server.default_num_speculative_tokens
        or "adaptive",
        "modes": [mode.label for mode in modes],
        "methods": {mode.label: mode.request for mode in modes},
        "default_method": server.default_method,
        "fingerprint": server.model.fingerprint,
        "workers": {_role(worker): worker.device for worker in server.workers},
        "attention": {_role(worker): worker.attention.chosen for worker in server.workers},
    }
    entries = {label: summarize(found, runs.get("plain")) for label, found in runs.items()}
    environment = report_of.environment(prompts_file, settings, server.model.name)
    return {
        "environment": environment,
        "modes": entries,
        "colocated_over_separate": ratios(entries, pairs(modes)),
    }


def _role(worker: WorkerState) -> str:
    """`target`, `draft`, and `draft@colocated` for the one in the target's process."""
    return f"{worker.role}@{COLOCATED}" if worker.placement == COLOCATED else worker.role


def bench(
    prompts: Annotated[
        Path,
        typer.Option(help='JSON lines: {"prompt": ...} or {"messages": [...]}, with "category".'),
    ],
    modes: Annotated[
        str,
        typer.Option(
            help="Modes to compare: `plain`, `draft` (the default drafter), or drafters by name: "
            "`ngram`, `hybrid`, `dflash`, `draft_model`; NAME@fast for one, NAME@colocated for the "
            "drafter in the target's process (NAME beside it is the separate one then)."
        ),
    ] = "plain,draft",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens a prompt.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="The seed of every prompt.")] = 0,
    colocate: Annotated[
        bool, typer.Option("--colocate", help="Measure each drafter that can in both places.")
    ] = False,
    exactness: Annotated[str, typer.Option(help="`exact` or `fast`, for all modes.")] = "exact",
    num_speculative_tokens: opt.DraftTokens = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N prompts.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the report here (.png, .svg).")] = None,
    address: opt.Address = "",
) -> None:
    """Measure modes against each other: speed, tau, acceptance, and whether ids stay the same.

    One request at a time, modes alternate prompt by prompt, generation stops at the end token.
    tau = (tokens - 1) / verify steps, summed per category, then the mean over categories.
    phase_ms in the JSON are totals: divide by rounds. A prompt's later modes, and later turns of a
    chat, find what they share in the prefix cache, as requests in service do. "outside" is what a
    round takes beyond the computing of target and draft: the median over the rounds that drafted.
    A deployment of its own has both a draft service and, where a mode asks for it, the same drafter
    in the target's process: one target serves all modes.

    Examples:

    \b
      specwire bench --prompts prompts.jsonl --modes plain,ngram,dflash --json out.json
      specwire bench --prompts prompts.jsonl --modes dflash,dflash@colocated
      specwire bench --prompts prompts.jsonl --modes plain@fast,draft --temperature 0.8 --seed 7
      specwire bench --prompts prompts.jsonl --address 127.0.0.1:7070 --plot out.png
    """
    chosen = parse_modes(modes, exactness)
    loaded = load_prompts(prompts, limit)
    if json_file is not None:
        report_of.require_writable("--json", json_file)
    if plot is not None:
        report_of.require_writable("--plot", plot)
        report_of.require_matplotlib()
    options = BenchOptions(max_tokens, temperature, seed, exactness, num_speculative_tokens)
    inside = colocate or wants_colocated(chosen)
    with opt.coordinator_address(address, LocalOptions(colocate=inside)) as found:
        run = compare(found, prompts, loaded, chosen, options, colocate=colocate)
        report = uvloop.run(run)
    report_of.print_table(report, report_of.console())
    if json_file is not None:
        report_of.write_json(report, json_file)
    if plot is not None:
        report_of.write_plot(report, plot)
