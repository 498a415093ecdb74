"""How a bench run is told: environment block, JSON file, table, plot."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specwire.errors import Reason, SpecwireError

Report = dict[str, Any]


def environment(prompts: Path, settings: Mapping[str, Any], model: str) -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "specwire": metadata.version("specwire"),
        "grpcio": metadata.version("grpcio"),
        "model": model,
        "prompts_file": prompts.name,
        "prompts_sha256": hashlib.sha256(prompts.read_bytes()).hexdigest(),
        **settings,
    }


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def require_writable(flag: str, path: Path) -> None:
    """Refuses, before minutes of measuring, a file that could not be written after them."""
    where = path if path.exists() else path.parent
    if path.is_dir() or not where.exists() or not os.access(where, os.W_OK):
        raise SpecwireError.field(flag, str(path), "a file in a directory that can be written to")


def write_json(report: Report, path: Path) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def console() -> Console:
    """Wide enough for the table where the output is a file or a pipe."""
    out = Console()
    return out if out.is_terminal else Console(width=110)


def print_table(report: Report, out: Console) -> None:
    env = report["environment"]
    title = f"{env['model']}, {env['exactness']}, T={env['temperature']:g}, concurrency 1"
    table = Table(title=title, title_justify="left")
    table.add_column("mode / category")
    headers = ("tok/s", "decode tok/s", "ttft p50", "p99 ms", "tau", "no loops", "identical")
    for header in (*headers, "outside"):
        table.add_column(header, justify="right")
    for mode, entry in report["modes"].items():
        table.add_row(mode, *_cells(entry), style="bold")
        for category, part in entry["by_category"].items():
            table.add_row(f"  {category}", *_cells(part))
        table.add_section()
    out.print(table)
    for line in notes(report):
        out.print(line, highlight=False, markup=False)


def _cells(entry: Mapping[str, Any]) -> list[str]:
    identical = entry["identical"]
    return [
        _number(entry["tokens_per_s"], 1),
        _number(entry["decode_tokens_per_s"], 1),
        _number(entry["ttft_ms_p50"], 0),
        _number(entry["ttft_ms_p99"], 0),
        _number(entry["tau"], 2),
        _number(entry["tau_without_loops"], 2),
        "-" if identical is None else f"{identical}/{entry['prompts']}",
        _number(entry["outside_ms_p50"], 2),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def notes(report: Report) -> list[str]:
    """Lines under the table: speed-ups over plain, of the places, acceptance, divergences."""
    lines = ["outside: ms of a round beyond the computing of target and draft, median over rounds"]
    if "draft" in report["modes"]:
        env = report["environment"]
        lines.append(f"draft: {env['default_method']}, K={env['num_speculative_tokens']}")
    for mode, found in report.get("colocated_over_separate", {}).items():
        rate = _number(found["decode_tokens_per_s"], 2)
        ours = _number(found["outside_ms_p50"], 2)
        theirs = _number(found["separate_outside_ms_p50"], 2)
        lines.append(f"{mode}: {rate} x separate (decode), outside {ours} ms against {theirs} ms")
    plain = report["modes"].get("plain", {}).get("decode_tokens_per_s")
    for mode, entry in report["modes"].items():
        if plain and mode != "plain" and entry["decode_tokens_per_s"]:
            lines.append(f"{mode}: {entry['decode_tokens_per_s'] / plain:.2f} x plain (decode)")
        if entry["acceptance_by_position"]:
            shares = " ".join(f"{share:.2f}" for share in entry["acceptance_by_position"])
            lines.append(f"{mode}: acceptance by position {shares}")
        for item in entry["divergences"]:
            margin = item["top2_margin"]
            shown = "unknown" if margin is None else f"{margin:.4g}"
            where = f"prompt {item['prompt']} ({item['category']}) at token {item['position']}"
            lines.append(f"{mode}: differs from plain on {where}, top-2 margin {shown}")
    return lines


def require_matplotlib() -> Any:
    """Asked for before the run, so that a missing library does not cost the measurement."""
    try:
        import matplotlib
    except ImportError as error:
        raise SpecwireError(
            Reason.UNSUPPORTED,
            "--plot needs matplotlib: pip install 'specwire[plot]'",
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def write_plot(report: Report, path: Path) -> None:
    pyplot = require_matplotlib()
    figure, (speed, accept) = pyplot.subplots(1, 2, figsize=(11, 4))
    modes = report["modes"]
    width = 0.8 / len(modes)
    for at, (mode, entry) in enumerate(modes.items()):
        bars = [part["decode_tokens_per_s"] or 0.0 for part in entry["by_category"].values()]
        speed.bar([i + at * width for i in range(len(bars))], bars, width, label=mode)
        shares = entry["acceptance_by_position"]
        if shares:
            accept.plot(range(1, len(shares) + 1), shares, marker="o", label=mode)
    categories = list(next(iter(modes.values()))["by_category"])
    speed.set_xticks([i + 0.4 - width / 2 for i in range(len(categories))], categories)
    speed.set_ylabel("decode tokens/s")
    speed.legend()
    accept.set_xlabel("draft position")
    accept.set_ylabel("acceptance (marginal)")
    accept.set_ylim(0, 1)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
