"""Every draft backend against every target backend, in running services: one text a target.

python -m tests.load.pairing_grid --device cuda        our pair on a GPU, then graphs on and off
python -m tests.load.pairing_grid --device cpu --targets TORCH_SDPA,CPU_ATTN --drafts TORCH_SDPA

For each target backend the text without a draft is what those with each draft backend must be;
where one differs, the place and the top-2 margin there are printed, and so for the targets against
the first. A backend that cannot be had prints its typed reason. Exit status 1: a text differs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from coordinator import demo
from coordinator.bench_prompts import load_prompts
from specwire.request import GenerateOptions
from tests.load.grid_run import Grid, Row, Side, run_grid

BACKENDS = ("FLASHINFER", "FLASH_ATTN", "FLEX_ATTENTION", "TRITON_ATTN", "TORCH_SDPA")
LATENT = ("TRITON_MLA", "TORCH_MLA")


def pinned(names: Sequence[str], flags: Sequence[str]) -> list[Side]:
    return [Side(name, (*flags, "--attention-backend", name)) for name in names]


def our_prompts(count: int, tokens: int) -> list[GenerateOptions]:
    """Half greedy, half sampled."""
    return [
        {
            "messages": prompt.messages, "max_tokens": tokens, "ignore_eos": True,
            "temperature": 0.8 * (index % 2), "seed": 20, "exactness": "exact",
        }
        for index, prompt in enumerate(load_prompts(demo.PROMPTS, count))
    ]  # fmt: skip


def id_prompts(count: int, tokens: int, vocab: int) -> list[GenerateOptions]:
    """For models that know no text."""
    return [
        {
            "token_ids": [(7 * i + 11 * index) % (vocab - 8) + 5 for i in range(12)],
            "max_tokens": tokens, "ignore_eos": True, "temperature": 0.8 * (index % 2),
            "seed": 20, "exactness": "exact",
        }
        for index in range(count)
    ]  # fmt: skip


def services_of(options: argparse.Namespace, model: str, draft: str) -> tuple[list[str], list[str]]:
    """Flags that all targets, and all drafts, have."""
    target = ["--model", model, "--device", options.device, "--max-draft-tokens", str(options.k)]
    drafts = ["--draft", draft, "--target", model, "--device", options.draft_device]
    drafts += ["--methods", "dflash", "--max-draft-tokens", str(options.k)]
    return target, [*drafts, "--rows-wait-ms", str(options.wait_ms)]


def grid_of(
    options: argparse.Namespace,
    targets: Sequence[Side],
    drafts: Sequence[Side],
    prompts: Sequence[GenerateOptions],
) -> Grid:
    patience = ("--proposal-wait-min-ms", str(options.wait_ms), "--breaker-lates", "1000")
    patience += ("--draft-open-ms", str(max(options.wait_ms, 1000)))
    return Grid(targets, drafts, patience, prompts, "dflash", options.k)


def dense(options: argparse.Namespace) -> Grid:
    target, draft = services_of(options, options.model, options.draft)
    prompts = our_prompts(options.prompts, options.tokens)
    targets, drafts = pinned(options.targets, target), pinned(options.drafts, draft)
    return grid_of(options, targets, drafts, prompts)


def reports(options: argparse.Namespace) -> Grid:
    """Target only, draft unset, draft pinned; each with graphs and without."""
    target, draft = services_of(options, options.model, options.draft)
    none = ("--cuda-graph-mode", "NONE")
    triton = ("--attention-backend", "TRITON_ATTN")
    targets = [Side("unset", tuple(target)), Side("unset, graphs NONE", (*target, *none))]
    drafts = [
        Side("unset", tuple(draft)), Side("TRITON_ATTN", (*draft, *triton)),
        Side("unset, graphs NONE", (*draft, *none)),
        Side("TRITON_ATTN, graphs NONE", (*draft, *triton, *none)),
    ]  # fmt: skip
    return grid_of(options, targets, drafts, our_prompts(options.prompts, options.tokens))


def latent(options: argparse.Namespace, folder: Path) -> Grid:
    """A random DeepSeek target, a random draft with heads of its own."""
    from tests.load.grid_models import write_latent_pair

    vocab = write_latent_pair(folder)
    target, draft = services_of(options, str(folder / "target"), str(folder / "draft"))
    prompts = id_prompts(options.prompts, options.tokens, vocab)
    return grid_of(options, pinned(LATENT, target), pinned(options.drafts, draft), prompts)


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
    return rows


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--device", default="auto", help="of the targets")
    made.add_argument("--draft-device", default="auto", help="of the drafts")
    made.add_argument("--model", default="default")
    made.add_argument("--draft", default="default", help="DFlash checkpoint")
    made.add_argument("--targets", default=",".join(BACKENDS), help="backends, by commas")
    made.add_argument("--drafts", default=",".join(BACKENDS), help="backends, by commas")
    made.add_argument("--parts", default="dense,reports,latent", help="what to run, by commas")
    made.add_argument("--prompts", type=int, default=3)
    made.add_argument("--tokens", type=int, default=48, help="of each answer")
    made.add_argument("--k", type=int, default=7, help="draft tokens a round")
    made.add_argument("--wait-ms", type=int, default=2000, help="patience with slow drafts")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    options.targets, options.drafts = options.targets.split(","), options.drafts.split(",")
    parts, rows = options.parts.split(","), []
    if "dense" in parts:
        rows += shown("backends of target and draft, our pair", dense(options))
    if "reports" in parts:
        rows += shown("target only, draft unset, draft pinned; graphs on and off", reports(options))
    if "latent" in parts:
        with tempfile.TemporaryDirectory() as folder:
            rows += shown("latent attention, random weights", latent(options, Path(folder)))
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
