"""What a load run found: percentiles, throughput, errors by reason; as JSON and as a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tests.load.openloop import UNFINISHED, Plan, Run, Sample

NAME = "specwire.load/1"
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}

_NUMBER = {"type": "number", "minimum": 0}
_COUNT = {"type": "integer", "minimum": 0}
_SUMMARY_FIELDS = {"count": _COUNT, **dict.fromkeys(("mean", *QUANTILES, "max"), _NUMBER)}
_TOP: dict[str, Any] = {
    "schema": {"enum": [NAME]},
    "service": {"enum": ["target", "draft", "coordinator"]},
    "address": {"type": "string"},
    "plan": {
        "type": "object",
        "properties": dict.fromkeys(("rate_per_s", "duration_s", "seed", "drain_s"), _NUMBER),
        "required": ["rate_per_s", "duration_s", "seed"],
    },
    "options": {"type": "object"},
    "counts": {
        "type": "object",
        "properties": dict.fromkeys(("scheduled", "ok", "failed", "unfinished"), _COUNT),
        "required": ["scheduled", "ok", "failed", "unfinished"],
        "additionalProperties": False,
    },
    "errors": {"type": "object", "additionalProperties": _COUNT},
    "throughput": {
        "type": "object",
        "properties": dict.fromkeys(("requests_per_s", "tokens_per_s"), _NUMBER),
        "required": ["requests_per_s", "tokens_per_s"],
        "additionalProperties": False,
    },
    "elapsed_s": _NUMBER,
    "latency_ms": {
        "type": "object",
        "required": ["session", "start_lag"],
        "additionalProperties": {
            "type": "object",
            "properties": _SUMMARY_FIELDS,
            "required": list(_SUMMARY_FIELDS),
            "additionalProperties": False,
        },
    },
}
# JSON Schema of a report.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": _TOP,
    "required": list(_TOP),
    "additionalProperties": False,
}


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank)."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"count": 0, "mean": 0.0, **dict.fromkeys(QUANTILES, 0.0), "max": 0.0}
    ordered = sorted(values)
    found = {name: round(percentile(ordered, share), 3) for name, share in QUANTILES.items()}
    mean = round(sum(ordered) / len(ordered), 3)
    return {"count": len(ordered), "mean": mean, **found, "max": round(ordered[-1], 3)}


def report(
    service: str, address: str, plan: Plan, options: Mapping[str, Any], run: Run
) -> dict[str, Any]:
    samples = run.samples
    errors = Counter(sample.error for sample in samples if sample.error)
    ok = [sample for sample in samples if not sample.error]
    unfinished = errors.pop(UNFINISHED, 0)
    return {
        "schema": NAME,
        "service": service,
        "address": address,
        "plan": {
            "rate_per_s": plan.rate_per_s,
            "duration_s": plan.duration_s,
            "seed": plan.seed,
            "drain_s": plan.drain_s,
        },
        "options": dict(options),
        "counts": {
            "scheduled": len(samples),
            "ok": len(ok),
            "failed": errors.total(),
            "unfinished": unfinished,
        },
        "errors": dict(errors),
        "throughput": {
            "requests_per_s": round(len(ok) / run.elapsed_s, 3),
            "tokens_per_s": round(sum(s.tokens for s in samples) / run.elapsed_s, 3),
        },
        "elapsed_s": round(run.elapsed_s, 3),
        "latency_ms": _latencies(samples),
    }


def _latencies(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """`session`: from the time it was due to its end; of one that did not end, its age. Failed
    ones are left out: a refusal is quick.
    """
    ended = [s for s in samples if s.error in ("", UNFINISHED)]
    spans = {name for sample in samples for name in sample.spans}
    return {
        "session": summary([(s.ended - s.scheduled) * 1000 for s in ended]),
        **{n: summary([v for s in samples for v in s.spans.get(n, ())]) for n in sorted(spans)},
        # How late the generator itself was: large values mean that it measures itself.
        "start_lag": summary([max(0.0, s.started - s.scheduled) * 1000 for s in samples]),
    }


def table(found: Mapping[str, Any]) -> str:
    counts, rates = found["counts"], found["throughput"]
    columns = ("count", "mean", *QUANTILES, "max")
    lines = [
        f"{found['service']} at {found['address']}, {found['plan']['rate_per_s']:g} sessions/s "
        f"for {found['plan']['duration_s']:g} s, seed {found['plan']['seed']}",
        "  ".join(f"{name} {count}" for name, count in counts.items()),
        f"{rates['requests_per_s']:.2f} sessions/s, {rates['tokens_per_s']:.1f} tokens/s",
        "",
        f"{'ms':<12}" + "".join(f"{name:>10}" for name in columns),
    ]
    for name, row in found["latency_ms"].items():
        cells = [f"{row[c]:>10.0f}" if c == "count" else f"{row[c]:>10.1f}" for c in columns]
        lines.append(f"{name:<12}" + "".join(cells))
    if found["errors"]:
        lines += ["", *(f"{count:>8}  {reason}" for reason, count in found["errors"].items())]
    return "\n".join(lines)
