"""What `specwire bench` computes from its runs. Pure functions: no clock, no network."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

LOOP_RATIO = 0.5


@dataclass(frozen=True)
class PromptRun:
    """One prompt generated once in one mode; times are the client's."""

    index: int
    category: str
    token_ids: tuple[int, ...]
    ttft_ms: float
    total_ms: float
    # Tokens that the first delta brought: they are not part of the decode time.
    first_tokens: int = 1
    rounds: int = 0
    margins: tuple[float, ...] = ()
    drafted_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    phase_ms: dict[str, float] = field(default_factory=dict)
    # Per verify step: draft tokens, and what it took beyond the computing of target and draft.
    drafted: tuple[int, ...] = ()
    outside_us: tuple[int, ...] = ()


def four_gram_ratio(ids: Sequence[int]) -> float:
    """Distinct over all 4-grams; 1.0 where there is no 4-gram."""
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


def is_loop(ids: Sequence[int]) -> bool:
    return four_gram_ratio(ids) < LOOP_RATIO


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linear interpolation between the closest ranks, as numpy's default."""
    if not values:
        return None
    ordered = sorted(values)
    rank = share * (len(ordered) - 1)
    low, high = math.floor(rank), math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def by_category(runs: Iterable[PromptRun]) -> dict[str, list[PromptRun]]:
    ordered = sorted(runs, key=lambda run: run.category)
    return {name: list(group) for name, group in groupby(ordered, key=lambda run: run.category)}


def tau(runs: Sequence[PromptRun]) -> float | None:
    """(tokens - 1) / verify steps, summed in each category, then the mean over categories."""
    values = []
    for group in by_category(runs).values():
        steps = sum(run.rounds for run in group)
        if steps:
            values.append(sum(max(len(run.token_ids) - 1, 0) for run in group) / steps)
    return statistics.fmean(values) if values else None


def acceptance_by_position(runs: Sequence[PromptRun]) -> list[float]:
    """Marginal: of the rounds whose draft reached position i, the share that accepted it."""
    width = max((len(run.drafted_by_position) for run in runs), default=0)
    drafted, accepted = [0] * width, [0] * width
    for run in runs:
        for i, count in enumerate(run.drafted_by_position):
            drafted[i] += count
        for i, count in enumerate(run.accepted_by_position[:width]):
            accepted[i] += count
    return [a / d for a, d in zip(accepted, drafted, strict=True) if d]


def divergence(run: PromptRun, plain: PromptRun) -> dict[str, Any] | None:
    """Where two outputs part, and how close the target's first two choices were there."""
    if run.token_ids == plain.token_ids:
        return None
    pairs = zip(run.token_ids, plain.token_ids, strict=False)
    shorter = min(len(run.token_ids), len(plain.token_ids))
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    margins = plain.margins if position < len(plain.margins) else run.margins
    margin = margins[position] if position < len(margins) else None
    return {
        "prompt": run.index,
        "category": run.category,
        "position": position,
        "top2_margin": margin,
    }


def summarize(runs: Sequence[PromptRun], plain: Sequence[PromptRun] | None) -> dict[str, Any]:
    """The JSON entry of one mode, with one of the same keys for each category."""
    groups = by_category(runs)
    categories = {name: _summary(group, plain) for name, group in groups.items()}
    return {**_summary(runs, plain), "by_category": categories}


def _summary(runs: Sequence[PromptRun], plain: Sequence[PromptRun] | None) -> dict[str, Any]:
    tokens = sum(len(run.token_ids) for run in runs)
    decoded = sum(max(len(run.token_ids) - run.first_tokens, 0) for run in runs)
    first_ms = [run.ttft_ms for run in runs]
    phases = sorted({name for run in runs for name in run.phase_ms})
    identical, divergences = _compare(runs, plain)
    return {
        "tokens_per_s": _rate(tokens, sum(run.total_ms for run in runs)),
        "decode_tokens_per_s": _rate(decoded, sum(r.total_ms - r.ttft_ms for r in runs)),
        "ttft_ms_p50": percentile(first_ms, 0.50),
        "ttft_ms_p99": percentile(first_ms, 0.99),
        "tau": tau(runs),
        "tau_without_loops": tau([run for run in runs if not is_loop(run.token_ids)]),
        "acceptance_by_position": acceptance_by_position(runs),
        "rounds": sum(run.rounds for run in runs),
        "decoded_tokens": decoded,
        "draft_tokens": sum(map(sum, (run.drafted for run in runs))),
        "phase_ms": {name: sum(r.phase_ms.get(name, 0.0) for r in runs) for name in phases},
        "outside_ms_p50": outside_ms_p50(runs),
        "prompts": len(runs),
        "identical": identical,
        "divergences": divergences,
    }


def _compare(
    runs: Sequence[PromptRun], plain: Sequence[PromptRun] | None
) -> tuple[int | None, list[dict[str, Any]]]:
    if plain is None:
        return None, []
    reference = {run.index: run for run in plain}
    found = [divergence(run, reference[run.index]) for run in runs]
    return sum(item is None for item in found), [item for item in found if item is not None]


def _rate(tokens: int, elapsed_ms: float) -> float | None:
    return tokens / elapsed_ms * 1e3 if elapsed_ms > 0 else None


def outside_ms_p50(runs: Iterable[PromptRun]) -> float | None:
    """Median over the rounds that drafted, or over all where none did, of what they took beyond the
    computing of target and draft."""
    steps = [step for run in runs for step in zip(run.outside_us, run.drafted, strict=True)]
    drafted = [outside for outside, tokens in steps if tokens]
    found = percentile(drafted or [outside for outside, _ in steps], 0.5)
    return None if found is None else found / 1e3


def ratios(
    entries: Mapping[str, Mapping[str, Any]], pairs: Iterable[tuple[str, str]]
) -> dict[str, dict[str, float | None]]:
    """By co-located mode: its rate over that of the separate one, and both rounds' outside."""
    found: dict[str, dict[str, float | None]] = {}
    for separate, colocated in pairs:
        one, two = entries[separate], entries[colocated]
        rates = one["decode_tokens_per_s"], two["decode_tokens_per_s"]
        found[colocated] = {
            "decode_tokens_per_s": rates[1] / rates[0] if all(rates) else None,
            "outside_ms_p50": two["outside_ms_p50"],
            "separate_outside_ms_p50": one["outside_ms_p50"],
        }
    return found
