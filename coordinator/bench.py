"""`specwire bench`: modes compared prompt by prompt, so that drift hits all alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from coordinator import bench_report as report_of
from coordinator import options as opt
from coordinator.bench_modes import Mode, check_own, colocated_methods, pairs, parse_modes, placed
from coordinator.bench_prompts import Prompt, load_prompts
from coordinator.bench_run import BenchOptions, Clients, run_modes
from coordinator.bench_stats import ratios, summarize
from coordinator.drafters import COLOCATED
from coordinator.local import COLOCATED_METHOD, LocalDeployment, LocalOptions, colocatable
from coordinator.runtime_file import running_address
from coordinator.signals import terminated_cleanly
from specwire.client import AsyncClient
from specwire.info import WorkerState


async def compare(
    address: str,
    prompts_file: Path,
    prompts: Sequence[Prompt],
    modes: Sequence[Mode],
    options: BenchOptions,
    *,
    colocate: bool = False,
    colocated: Mapping[str, str] | None = None,
) -> report_of.Report:
    """The JSON report. `colocate`: drafters that are in both places are measured in both.
    `colocated`: addresses of co-located drafters by method, where those are other deployments."""
    async with AsyncExitStack() as stack:

        async def connect(found: str) -> AsyncClient:
            return await stack.enter_async_context(AsyncClient(found))

        first = await connect(address)
        inside = {method: await connect(at) for method, at in (colocated or {}).items()}
        servers = [await client.info() for client in (first, *inside.values())]
        modes = placed(modes, servers, both=colocate)
        runs = await run_modes(Clients(first, inside), prompts, modes, options, opt.say)
    server, workers = servers[0], [worker for info in servers for worker in info.workers]
    settings = {
        **asdict(options),
        "num_speculative_tokens": options.num_speculative_tokens
        or server.default_num_speculative_tokens
        or "adaptive",
        "modes": [mode.label for mode in modes],
        "methods": {mode.label: mode.request for mode in modes},
        "default_method": server.default_method,
        "fingerprint": server.model.fingerprint,
        "workers": {_role(worker): worker.device for worker in workers},
        "attention": {_role(worker): worker.attention.chosen for worker in workers},
    }
    entries = {label: summarize(found, runs.get("plain")) for label, found in runs.items()}
    return {
        "environment": report_of.environment(prompts_file, settings, server.model.name),
        "modes": entries,
        "colocated_over_separate": ratios(entries, pairs(modes)),
    }


def _role(worker: WorkerState) -> str:
    """`target`, `draft`, and `dflash@colocated` for the one in the target's process."""
    inside = worker.placement == COLOCATED
    return f"{'+'.join(worker.methods)}@{COLOCATED}" if inside else worker.role


@contextmanager
def _deployments(address: str, inside: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """The address given, or that of a running deployment; else an own one, and one with each of the
    drafters `inside` in its target's process: topologies as `specwire up` starts them."""
    own = not (address or running_address())
    with opt.coordinator_address(address) as found, ExitStack() as stack:
        others: dict[str, str] = {}
        if own and inside:
            stack.enter_context(terminated_cleanly())
            for method in inside:
                other = LocalDeployment(LocalOptions(colocate=method), opt.say)
                others[method] = stack.enter_context(other).address
        yield found, others


def bench(
    prompts: Annotated[
        Path,
        typer.Option(help='JSON lines: {"prompt": ...} or {"messages": [...]}, with "category".'),
    ],
    modes: Annotated[
        str,
        typer.Option(
            help="Modes to compare: `plain`, `draft` (the default drafter), or drafters by name: "
            "`ngram`, `hybrid`, `dflash`, `draft_model`; NAME@fast for one; "
            "`dflash@colocated`, `dspark@colocated` for those in the target's process (NAME beside "
            "one is the separate one then)."
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
    Without an address each co-located drafter that a mode asks for is started with a target of its
    own, beside a deployment with a draft service.

    Examples:

    \b
      specwire bench --prompts prompts.jsonl --modes plain,ngram,dflash --json out.json
      specwire bench --prompts prompts.jsonl --modes dflash,dflash@colocated,dspark@colocated
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
    if not (address or running_address()):
        check_own(chosen)
    inside = colocated_methods(chosen, COLOCATED_METHOD, colocatable(), both=colocate)
    with _deployments(address, inside) as (found, others):
        run = compare(found, prompts, loaded, chosen, options, colocate=colocate, colocated=others)
        report = uvloop.run(run)
    report_of.print_table(report, report_of.console())
    if json_file is not None:
        report_of.write_json(report, json_file)
    if plot is not None:
        report_of.write_plot(report, plot)
