"""The parts of `pairing_grid`: which services are paired, with which flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from coordinator import demo
from coordinator.bench_prompts import load_prompts
from specwire.request import GenerateOptions
from tests.load.grid_rows import Grid, Side

BACKENDS = ("FLASHINFER", "FLASH_ATTN", "FLEX_ATTENTION", "TRITON_ATTN", "TORCH_SDPA")
LATENT = ("TRITON_MLA", "TORCH_MLA")
PARTS = ("dense", "reports", "latent", "latent-drafts")


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


def services_of(
    options: argparse.Namespace, model: str, draft: str, method: str = "dflash"
) -> tuple[list[str], list[str]]:
    """Flags that all targets, and all drafts, have."""
    target = ["--model", model, "--device", options.device, "--max-draft-tokens", str(options.k)]
    drafts = ["--target", model, "--device", options.draft_device, "--methods", method]
    drafts += ["--dspark" if method == "dspark" else "--draft", draft]
    drafts += ["--max-draft-tokens", str(options.k)]
    return target, [*drafts, "--rows-wait-ms", str(options.wait_ms)]


def grid_of(
    options: argparse.Namespace,
    targets: Sequence[Side],
    drafts: Sequence[Side],
    prompts: Sequence[GenerateOptions],
) -> Grid:
    patience = ("--proposal-wait-min-ms", str(options.wait_ms), "--breaker-lates", "1000")
    patience += ("--draft-open-ms", str(max(options.wait_ms, 1000)))
    return Grid(targets, drafts, patience, prompts, "dflash", options.k, options.start_s)


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


def latent_drafts(options: argparse.Namespace, folder: Path) -> Grid:
    """The same target and a DSpark draft with its attention, as a service and in the target's own
    cache, plain and fp8."""
    from tests.load.grid_models import write_latent_pair

    vocab, draft = write_latent_pair(folder), str(folder / "dspark")
    target, drafts = services_of(options, str(folder / "target"), draft, "dspark")
    backend, fp8 = ("--attention-backend", options.latent_backend), ("--kv-dtype", "fp8")
    beside = ("--colocate", "dspark", "--draft-checkpoint", draft, "--draft-kv-group", "same_cache")
    beside = (*target, *backend, *beside, "--draft-max-tokens", str(options.k))
    made = grid_of(
        options,
        [
            Side("plain KV", (*target, *backend)),
            Side("plain KV, draft beside", beside, beside=True),
            Side("fp8 KV, draft beside", (*beside, *fp8), beside=True),
        ],
        [
            Side("plain KV", (*drafts, *backend)),
            Side("fp8 KV", (*drafts, *backend, *fp8)),
        ],
        id_prompts(options.prompts, options.tokens, vocab),
    )
    captured = options.latent_backend == "TRITON_MLA" and options.device.startswith("cuda")
    return replace(made, method="dspark", captured=captured, accepted=True)
