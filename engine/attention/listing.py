"""The table of declared limits as rows of words, for the command and the documentation."""

from __future__ import annotations

from collections.abc import Iterable

from engine.attention import table_native
from engine.attention.capabilities import Backend, GraphLevel, GraphRule
from engine.attention.devices import ANYWHERE, Range
from engine.attention.tables import table_for

HEADER = (
    "backend", "layers", "device", "KV dtypes", "page tokens", "head size", "modes", "DCP",
    "LSE", "CUDA graphs", "here", "note",
)  # fmt: skip
_LEVELS = {
    GraphLevel.ALWAYS: "A",
    GraphLevel.UNIFORM: "UB",
    GraphLevel.UNIFORM_SINGLE: "U1",
    GraphLevel.NEVER: "N",
}


def listing() -> list[tuple[str, ...]]:
    """Our rows first, then those that the vLLM engine runs."""
    return [_row(row) for row in (*table_native.ROWS, *table_for("vllm").values())]


def markdown() -> str:
    lines = ["| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER)]
    lines += ["| " + " | ".join(row) + " |" for row in listing()]
    return "\n".join(lines)


def _row(row: Backend) -> tuple[str, ...]:
    here = "judged only"
    if row.implemented:
        here = f"implemented, {'ran' if row.ran_on_gpu else 'never ran'} on a GPU"
    kv = [
        ", ".join(rule.accepts)
        + (f" as {rule.stored}" if rule.stored and rule.stored != "fp8_e4m3" else "")
        + _where(rule.on)
        + (f" (needs {' or '.join(rule.only)})" if rule.only else "")
        for rule in row.kv
    ]
    open_ = "non-causal" if row.non_causal_full else "non-causal with a window"
    modes = ["causal"] * row.causal + [open_] * row.non_causal + ["window"] * row.window
    modes += [f"sinks{_where(row.sinks)}"] if row.sinks else []
    dcp = ["causal"] * row.dcp_causal + ["non-causal"] * row.dcp_non_causal
    dcp += [f"with {', '.join(row.dcp_kv)}"] if row.dcp_kv else []
    return (
        row.name,
        ", ".join(kind.value for kind in row.kinds),
        ", ".join("any GPU" if str(item) == "0.0 and above" else str(item) for item in row.on),
        "; ".join(kv),
        "; ".join(f"{size}{_where(size.on)}" for size in row.pages),
        "; ".join(f"{size}{_where(size.on)}" for size in row.heads),
        ", ".join(modes),
        ", ".join(dcp) or "no",
        row.lse_base or "-",
        "; ".join(map(_graph, row.graphs)),
        here,
        row.note,
    )


def _graph(rule: GraphRule) -> str:
    words: Iterable[tuple[bool | None, str, str]] = (
        (rule.dcp, "with DCP", "without DCP"),
        (rule.causal, "causal", "non-causal"),
        (rule.windowed, "windowed", "without window"),
        (rule.single_token, "one token", "several tokens"),
    )
    when = [yes if value else no for value, yes, no in words if value is not None]
    return " ".join([_LEVELS[rule.level], *when]) + _where(rule.on)


def _where(ranges: tuple[Range, ...]) -> str:
    if ranges == ANYWHERE or any(str(item) == "0.0 and above" for item in ranges):
        return ""
    return f" on {', '.join(map(str, ranges))}"
