"""`specwire plan`: co-located or separate, for a pair, a link and a load."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from coordinator import topology_check as check
from coordinator import topology_view as view
from coordinator.bench_report import console
from coordinator.footprint import (
    DTYPE_BYTES,
    Footprint,
    Room,
    check_made_for,
    read_footprint,
    rooms,
)
from coordinator.topology import Work
from coordinator.topology_inputs import (
    Workers,
    ask,
    check_given,
    missing,
    row_bytes,
    taus_of,
    work,
)
from coordinator.topology_link import Link
from coordinator.topology_measured import read_report
from coordinator.topology_report import Report, compare
from specwire.errors import Reason, SpecwireError

_GB = 1e9
_NOTHING = (
    "nothing to compute with. Needed are step times, by --from ADDRESS of running workers or by "
    "--verify-ms and --draft-ms, and the tokens of a round, by --acceptance or by --k and --tau; "
    "or --from-bench REPORT alone. `specwire plan --help` has examples"
)


def plan(
    target: Annotated[
        str, typer.Option(help="Checkpoint of the target: a directory, or its config.json.")
    ] = "",
    draft: Annotated[
        str, typer.Option(help="Checkpoint of the draft: a directory, or its config.json.")
    ] = "",
    workers: Annotated[
        list[str] | None,
        typer.Option("--from", help="Address of a worker whose measured times count; repeat it."),
    ] = None,
    method: Annotated[str, typer.Option(help="Drafter of --from; unset: its default.")] = "",
    rtt_ms: Annotated[
        float | None,
        typer.Option(help="Round trip to the draft; unset: measured with --from, or 0."),
    ] = None,
    bandwidth_gbit: Annotated[float, typer.Option(help="From target to draft, Gbit/s.")] = 10.0,
    exchange_ms: Annotated[
        float, typer.Option(help="What an exchange takes beside the wire, both ends together.")
    ] = 0.5,
    target_rtt_ms: Annotated[
        float, typer.Option(help="Round trip between coordinator and target.")
    ] = 0.0,
    draft_ahead: Annotated[
        int,
        typer.Option(
            min=0,
            help="Rounds that a target goes on by itself with a draft that it asks.",
        ),
    ] = 8,
    free_run: Annotated[
        int, typer.Option(min=0, help="Steps that a target without a draft goes on by itself.")
    ] = 32,
    session_ms: Annotated[
        float, typer.Option(help="What the services do for one more session in a plain round.")
    ] = 0.012,
    batch: Annotated[int, typer.Option(min=1, help="Sessions that decode at once.")] = 1,
    context_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of a session, where --from knows several lengths.")
    ] = 1024,
    k: Annotated[
        int | None, typer.Option("--k", help="Draft tokens a round; unset: the best of each.")
    ] = None,
    tau: Annotated[float | None, typer.Option(help="Tokens a round, with --k.")] = None,
    acceptance: Annotated[
        str, typer.Option(help="Chance by position given those before, as 0.66,0.58,0.52.")
    ] = "",
    plain_ms: Annotated[
        str, typer.Option(help="Step without draft tokens; unset: as --verify-ms.")
    ] = "",
    verify_ms: Annotated[
        str, typer.Option(help="Step with K draft tokens: MS, or SESSIONS:MS,SESSIONS:MS.")
    ] = "",
    draft_ms: Annotated[str, typer.Option(help="Proposal of K tokens, alike.")] = "",
    colocated_draft_ms: Annotated[
        str, typer.Option(help="The same on the target's device; unset: as --draft-ms.")
    ] = "",
    memory_gb: Annotated[float, typer.Option(min=0, help="Of the target's device.")] = 0.0,
    draft_memory_gb: Annotated[
        float | None, typer.Option(min=0, help="Of the draft's own; unset: as --memory-gb.")
    ] = None,
    kv_dtype: Annotated[str, typer.Option(help="auto, or one of both caches.")] = "auto",
    from_bench: Annotated[
        Path | None,
        typer.Option(
            help="Report of `specwire bench --json` or `tests.load.sessions --json`: predictions "
            "beside what it measured."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Compute whether a draft should share the target's device and KV or be a service of its own.

    Times come from running workers or from the options, bytes from the checkpoints' config.json.
    Nothing is loaded. docs/topologies.md has the equations.

    Examples:

    \b
      specwire plan --from 10.0.0.1:7001 --from 10.0.0.2:7002 --acceptance 0.66,0.58,0.52
      specwire plan --from-bench out.json
      specwire plan --from-bench sessions.json --k 7 --plain-ms 1:17 --verify-ms 1:20 --draft-ms 1:5
      specwire plan --k 7 --tau 2.7 --verify-ms 20 --plain-ms 17 --draft-ms 5 --rtt-ms 2
      specwire plan --target ./8B --draft ./8B-DFlash --from gpu:7001 --memory-gb 80 --k 7 --tau 4
    """
    by_hand = {
        "--plain-ms": plain_ms,
        "--verify-ms": verify_ms,
        "--draft-ms": draft_ms,
        "--colocated-draft-ms": colocated_draft_ms,
    }
    texts = acceptance, target, draft, *by_hand.values()
    if not (from_bench or workers or any(texts)) and k is None and tau is None:
        raise SpecwireError(Reason.SETTINGS_INVALID, _NOTHING)
    check_given(k, tau, acceptance, by_hand)
    _check(kv_dtype, rtt_ms, bandwidth_gbit, exchange_ms, target_rtt_ms, session_ms)
    told = ask(workers or (), method)
    timed = partial(
        work,
        told,
        plain_ms=plain_ms,
        verify_ms=verify_ms,
        draft_ms=draft_ms,
        colocated_draft_ms=colocated_draft_ms,
    )
    link = Link(
        rtt_ms or 0.0, bandwidth_gbit, exchange_ms, target_rtt_ms, draft_ahead, session_ms, free_run
    )
    if from_bench is not None:
        found = read_report(from_bench)
        times = plain_ms, verify_ms, draft_ms, colocated_draft_ms
        wanted = workers or k is not None or any(times)
        given = _given_times(timed, k, context_tokens) if wanted else None
        link = replace(link, rtt_ms=_rtt(rtt_ms, told, exchange_ms))
        _show_check(check.predict(found, link, given, method), as_json)
        return
    sizes = _sizes(target, draft, kv_dtype)
    most = min(told.most_k, sizes[1].max_draft_tokens or told.most_k) if sizes else told.most_k
    each_row = row_bytes(told, *(sizes or (None, None)))
    load = timed(taus_of(k, tau, acceptance, most), batch, context_tokens, each_row)
    link = replace(link, rtt_ms=_rtt(rtt_ms, told, exchange_ms))
    report = compare(load, link, _rooms(sizes, memory_gb, draft_memory_gb))
    _show(report, load, link, told, as_json)


def _given_times(timed: Callable[..., Work], k: int | None, context_tokens: int) -> Work:
    """Step times for modes that were measured, whose tokens a round are known."""
    if k is None:
        raise missing("--k", "the draft tokens of a round that the given times are of")
    return timed({k: 1.0}, 1, context_tokens, 0)


def _show(report: Report, load: Work, link: Link, told: Workers, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.to_json(load, link)))
        return
    view.show(console(), report, load, link, told.names)


def _show_check(predicted: Sequence[check.Predicted], as_json: bool) -> None:
    if as_json:
        print(json.dumps([one.to_json() for one in predicted]))
        return
    view.show_check(console(), predicted)


def _check(kv_dtype: str, rtt_ms: float | None, bandwidth: float, *not_negative: float) -> None:
    if kv_dtype != "auto" and kv_dtype not in DTYPE_BYTES:
        accepted = ", ".join(("auto", *DTYPE_BYTES))
        raise SpecwireError.field("--kv-dtype", kv_dtype, accepted, Reason.SETTINGS_INVALID)
    if not 0 < bandwidth < float("inf"):
        raise SpecwireError.field("--bandwidth-gbit", bandwidth, "a number above 0")
    names = ("--rtt-ms", "--exchange-ms", "--target-rtt-ms", "--session-ms")
    for name, value in zip(names, (rtt_ms or 0.0, *not_negative), strict=True):
        if not 0 <= value < float("inf"):
            raise SpecwireError.field(name, value, "0 or more, in ms")


def _sizes(target: str, draft: str, kv_dtype: str) -> tuple[Footprint, Footprint] | None:
    if bool(target) != bool(draft):
        flag = "--draft" if target else "--target"
        raise missing(flag, "a checkpoint, where the other is given")
    if not target:
        return None
    sizes = (
        read_footprint("--target", target, kv_dtype),
        read_footprint("--draft", draft, kv_dtype),
    )
    check_made_for("--draft", sizes[1], sizes[0])
    return sizes


def _rooms(
    sizes: tuple[Footprint, Footprint] | None, memory_gb: float, draft_memory_gb: float | None
) -> list[Room]:
    if sizes is None:
        return []
    memory = int(memory_gb * _GB)
    other = memory if draft_memory_gb is None else int(draft_memory_gb * _GB)
    return rooms(*sizes, memory, other)


def _rtt(given: float | None, told: Workers, exchange_ms: float) -> float:
    """A call that was measured has the work of both ends in it, which is counted apart."""
    if given is not None:
        return given
    return max(0.0, (told.rtt_ms or 0.0) - exchange_ms)
