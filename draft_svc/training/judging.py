"""The commands that judge a draft: `evaluate`, and `export`, which writes what was found."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from draft_svc.training.draft import DraftNet
from draft_svc.training.evaluate import SetReport, as_json, evaluate, table
from draft_svc.training.export import export, load_export, read_spec
from draft_svc.training.generate import weights_sha256
from draft_svc.training.net import TargetNet
from draft_svc.training.opening import eval_prompts, open_target, say, stop_ids
from engine.weights import read_json


def load_draft(path: Path, net: TargetNet) -> DraftNet:
    draft = DraftNet(read_spec(path, path.name, net.config), net, 0)
    load_export(path, draft)
    return draft


def run_evaluate(args: argparse.Namespace) -> None:
    _, net, chat = open_target(args)
    prompts = [
        prompt
        for template in args.templates
        for prompt in eval_prompts(args.prompts, chat, args.per_set, args.categories, template)
    ]
    results: dict[str, Any] = {}
    for path in map(Path, args.draft):
        draft = load_draft(path, net)
        reports: list[SetReport] = []
        begun = time.monotonic()
        for temperature in args.temperatures:
            reports += evaluate(
                draft,
                prompts,
                max_new=args.max_new,
                stop_ids=stop_ids(net, chat),
                temperature=temperature,
                seed=args.seed,
                together=args.together,
            )
        say(f"{path.name} ({time.monotonic() - begun:.0f} s)\n{table(reports)}")
        results[path.name] = as_json(reports)
    if args.out:
        Path(args.out).write_text(json.dumps(results, indent=1) + "\n")


def run_export(args: argparse.Namespace) -> None:
    """Writes a draft again with figures of an evaluation in its model card."""
    directory, net, _ = open_target(args)
    source = Path(args.draft)
    draft = load_draft(source, net)
    draft.spec = replace(draft.spec, name=Path(args.out).name)
    figures = json.loads(args.figures.read_text()).get(source.name, []) if args.figures else []
    known = source / "training.json"
    facts: dict[str, Any] = read_json(known) if known.is_file() else {}
    facts |= {"target weights sha256": weights_sha256(directory)}
    facts |= dict(pair.split("=", 1) for pair in args.fact)
    size = export(draft, Path(args.out), facts, [SetReport(**r) for r in figures])
    say(f"{size / 1e6:.1f} MB")
