"""Every draft backend against every target backend, in running services: one text a target.

python -m tests.load.pairing_grid --device cuda        our pair on a GPU, then graphs on and off
python -m tests.load.pairing_grid --device cuda --parts latent-drafts    a DeepSeek pair
python -m tests.load.pairing_grid --device cuda --parts dense --backends FLASHINFER,TRITON_ATTN
python -m tests.load.pairing_grid --device cpu --targets TORCH_SDPA,CPU_ATTN --drafts TORCH_SDPA

For each target backend the text without a draft is what those with each draft backend must be;
where one differs, the place and the top-2 margin there are printed, and so for the targets against
the first. A backend that cannot be had is left out with its typed reason; what ends otherwise, or
does not serve in time, is wrong. FLASHINFER compiles for minutes where it never ran before. Exit
status 1: something is wrong.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.load.grid_parts import BACKENDS, LATENT, PARTS, dense, latent, latent_drafts, reports
from tests.load.grid_rows import Grid, Row, left_out
from tests.load.grid_run import run_grid


def shown(title: str, grid: Grid) -> list[Row]:
    print(f"\n{title}", flush=True)
    began = time.monotonic()
    rows = run_grid(grid, lambda text: print(text, flush=True))
    pairs = sum(row.found == "identical" for row in rows)
    wrong, refused = (
        sum(x) for x in zip(*((r.wrong, not r.target_runs) for r in rows), strict=True)
    )
    spent = time.monotonic() - began
    print(
        f"{pairs} pairs identical, {wrong} wrong, {refused} not to be had, {spent:.0f} s",
        flush=True,
    )
    for text in left_out(rows):
        print(text, flush=True)
    return rows


def not_asked(options: argparse.Namespace) -> str:
    """Backends and parts that the flags leave out."""
    lacking = {
        "targets": [name for name in BACKENDS if name not in options.targets],
        "drafts": [name for name in BACKENDS if name not in options.drafts],
        "parts": [part for part in PARTS if part not in options.parts],
    }
    told = [f"{what} {', '.join(names)}" for what, names in lacking.items() if names]
    return "; ".join(told)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--device", default="auto", help="of the targets")
    made.add_argument("--draft-device", default="auto", help="of the drafts")
    made.add_argument("--model", default="default")
    made.add_argument("--draft", default="default", help="DFlash checkpoint")
    names = ",".join(BACKENDS)
    made.add_argument("--backends", default=names, help="of targets and drafts, by commas")
    made.add_argument("--targets", help="backends, by commas; unset: those of --backends")
    made.add_argument("--drafts", help="backends, by commas; unset: those of --backends")
    made.add_argument("--latent-backend", default=LATENT[0], help="of the part latent-drafts")
    made.add_argument("--parts", default=",".join(PARTS), help="what to run, by commas")
    made.add_argument("--start-s", type=float, default=600, help="patience with a start")
    made.add_argument("--prompts", type=int, default=3)
    made.add_argument("--tokens", type=int, default=48, help="of each answer")
    made.add_argument("--k", type=int, default=7, help="draft tokens a round")
    made.add_argument("--wait-ms", type=int, default=2000, help="patience with slow drafts")
    return made


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Lists where the flags have commas."""
    options = parser().parse_args(argv)
    options.targets, options.drafts = (
        (named or options.backends).split(",") for named in (options.targets, options.drafts)
    )
    options.parts = options.parts.split(",")
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser().error(f"--parts {unknown[0]!r} is none of {', '.join(PARTS)}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    parts = options.parts
    rows: list[Row] = []
    if "dense" in parts:
        rows += shown("backends of target and draft, our pair", dense(options))
    if "reports" in parts:
        rows += shown("target only, draft unset, draft pinned; graphs on and off", reports(options))
    if "latent" in parts:
        with tempfile.TemporaryDirectory() as folder:
            rows += shown("latent attention, random weights", latent(options, Path(folder)))
    if "latent-drafts" in parts:
        with tempfile.TemporaryDirectory() as folder:
            rows += shown("latent attention in both, random", latent_drafts(options, Path(folder)))
    if left := not_asked(options):
        print(f"\nnot asked for: {left}", flush=True)
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
