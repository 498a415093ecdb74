"""`evaluate` and the gate: tau of the real loop per category, beside n-gram lookup."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from draft_svc.methods.ngram import NgramIndex
from draft_svc.training.draft import DraftNet
from draft_svc.training.loop import Outcome, speculate
from draft_svc.training.shards import distinct_ratio

LOOP_RATIO = 0.5
_NGRAM = (2, 4)


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    category: str
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Gate:
    """Held-out prompts of the real loop."""

    prompts: Sequence[EvalPrompt]
    stop_ids: Sequence[int]
    max_new: int = 128


@dataclass(slots=True)
class SetReport:
    """One category at one temperature. tau: tokens per verify round of all outputs that do not
    loop, as `specwire bench` counts; tau_all: looping ones included; tau_mean: each output's own
    tau, averaged (loops left out).

    accept[k]: share of rounds whose proposal k + 1 was accepted; conditional[k]: of those that
    accepted all before it.
    """

    category: str
    temperature: float
    prompts: int
    looping: int
    tau: float
    tau_all: float
    tau_mean: float
    ngram_tau: float
    accept: list[float] = field(default_factory=list)
    conditional: list[float] = field(default_factory=list)


def ngram_rounds(outcome: Outcome, k: int) -> tuple[int, int]:
    """Tokens and verify rounds that lookup in prompt and output would have had on this text."""
    text = [*outcome.prompt, *outcome.ids]
    index = NgramIndex(*_NGRAM, text[: len(outcome.prompt) + 1])
    place, emitted, rounds = len(outcome.prompt) + 1, 0, 0
    while place < len(text):
        got = 0
        for token in index.lookup(k)[1]:
            if place + got >= len(text) - 1 or text[place + got] != token:
                break
            got += 1
        new = text[place : place + got + 1]
        index.extend(new)
        place, emitted, rounds = place + len(new), emitted + len(new), rounds + 1
    return emitted, rounds


def evaluate(
    draft: DraftNet,
    prompts: Sequence[EvalPrompt],
    *,
    max_new: int,
    stop_ids: Sequence[int],
    temperature: float = 0.0,
    seed: int = 0,
    together: int = 64,
) -> list[SetReport]:
    outcomes = speculate(
        draft.net,
        draft,
        [p.ids for p in prompts],
        max_new=max_new,
        stop_ids=stop_ids,
        temperature=temperature,
        seed=seed,
        together=together,
    )
    sets: dict[str, list[Outcome]] = defaultdict(list)
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        sets[prompt.category].append(outcome)
    k = draft.spec.proposals
    return [_report(name, found, temperature, k) for name, found in sets.items()]


def _report(name: str, outcomes: list[Outcome], temperature: float, k: int) -> SetReport:
    usable = [o for o in outcomes if o.emitted]
    clean = [o for o in usable if distinct_ratio(o.ids) >= LOOP_RATIO]
    rounds = [a for o in clean for a in o.accepted]
    reached = [sum(a >= i for a in rounds) for i in range(k + 1)]
    return SetReport(
        category=name,
        temperature=temperature,
        prompts=len(outcomes),
        looping=len(usable) - len(clean),
        tau=_pooled([(sum(o.emitted), len(o.emitted)) for o in clean]),
        tau_all=_pooled([(sum(o.emitted), len(o.emitted)) for o in usable]),
        tau_mean=_pooled([(o.tau, 1) for o in clean]),
        ngram_tau=_pooled([ngram_rounds(o, k) for o in clean]),
        accept=[round(reached[i + 1] / max(len(rounds), 1), 3) for i in range(k)],
        conditional=[round(reached[i + 1] / max(reached[i], 1), 3) for i in range(k)],
    )


def _pooled(pairs: Sequence[tuple[float, int]]) -> float:
    """Sum of the first over sum of the second."""
    rounds = sum(count for _, count in pairs)
    return round(sum(value for value, _ in pairs) / rounds, 3) if rounds else 0.0


def table(reports: Sequence[SetReport]) -> str:
    """A table in Markdown."""
    lines = [
        "| set | T | prompts | looping | tau | tau (all) | mean of taus | n-gram tau "
        "| accepted at 1, 2, ... |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in reports:
        accept = " ".join(f"{a:.2f}" for a in r.accept)
        lines.append(
            f"| {r.category} | {r.temperature:g} | {r.prompts} | {r.looping} | {r.tau:.2f} "
            f"| {r.tau_all:.2f} | {r.tau_mean:.2f} | {r.ngram_tau:.2f} | {accept} |"
        )
    return "\n".join(lines)


def as_json(reports: Sequence[SetReport]) -> list[dict[str, Any]]:
    return [asdict(r) for r in reports]
