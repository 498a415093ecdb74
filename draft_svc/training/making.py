"""The commands that make a draft: `generate` and `train`."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from draft_svc.training.batches import BatchOptions
from draft_svc.training.chat import Chat
from draft_svc.training.evaluate import EvalPrompt, Gate, SetReport, table
from draft_svc.training.export import MAX_BYTES, export, load_export, read_spec
from draft_svc.training.generate import GenerateOptions, generate, weights_sha256
from draft_svc.training.kernels import LossMix
from draft_svc.training.net import TargetNet
from draft_svc.training.objective import LossOptions
from draft_svc.training.opening import eval_prompts, open_target, say, stop_ids
from draft_svc.training.prompts import KINDS
from draft_svc.training.schedule import TrainOptions
from draft_svc.training.shards import Corpus, Manifest, load_corpus, read_manifest
from draft_svc.training.spec import DraftSpec, parse_spec
from draft_svc.training.trainer import Trainer
from engine.errors import CheckpointError

PROGRAM = "python -m draft_svc.training"


def run_generate(args: argparse.Namespace) -> None:
    directory, net, chat = open_target(args)
    manifest = Manifest(
        weights_sha256(directory), chat.hash if chat else "", args.holdout, args.seed
    )
    options = GenerateOptions(
        minutes=args.minutes,
        answer_tokens=args.answer_tokens,
        slots=args.slots,
        max_length=args.max_length,
        max_new=args.max_new,
        greedy_share=args.greedy_share,
        temperature=args.temperature,
        passage_share=args.passage_share,
        seed=args.seed,
        stride=args.stride,
        graph=not args.eager,
    )
    manifest.settings = asdict(options)
    if (args.prompts_only or chat is None) and not args.prompts:
        raise CheckpointError("without prompts by the target, --prompts must name a file")
    options = replace(options, own_prompts=chat is not None and not args.prompts_only)
    done = generate(net, chat, Path(args.out), manifest, options, args.prompts, say)
    say(json.dumps(done.counts))


def _mix(text: str) -> LossMix:
    try:
        pairs = [pair.split("=") for pair in text.split(",")]
        return LossMix(**{"ce": 0.0} | {k: float(v) for k, v in pairs})
    except (ValueError, TypeError):
        raise CheckpointError(f"loss {text!r} is not valid; example: ce=0.1,tv=0.9") from None


def _loss_options(args: argparse.Namespace) -> LossOptions:
    mix, late = _mix(args.loss), _mix(args.late_loss)
    return LossOptions(mix, late, args.late_from, args.weighting, args.decay, args.alpha)


def run_train(args: argparse.Namespace) -> None:
    directory, net, chat = open_target(args)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    starts = [Path(path) for path in args.init_from]
    specs = [parse_spec(text, net.config) for text in args.draft]
    specs += [read_spec(path, path.name, net.config) for path in starts]
    options = _train_options(args, specs)
    data = [Path(path) for path in args.data]
    sha = _check_data(data, directory)
    trainer = Trainer(net, specs, load_corpus(data), options, say)
    checkpoint = out / "trainer.pt"
    if checkpoint.is_file() and not args.restart:
        trainer.resume(checkpoint)
        say(f"resumed at step {trainer.step}, {trainer.elapsed:.0f} s")
    else:
        trainer.measure_scale()
        for draft, path in zip(trainer.drafts[len(args.draft) :], starts, strict=True):
            load_export(path, draft)
    gate = _gate(args, net, chat, data)
    facts = _facts(args, sha, data, options)

    def write(reports: Sequence[Sequence[SetReport]] | None = None) -> None:
        for i, draft in enumerate(trainer.drafts):
            known = reports[i] if reports else ()
            more = facts | {"steps": trainer.step, "answer tokens seen": trainer.tokens}
            size = export(draft, out / draft.spec.name, more, known)
            if size > MAX_BYTES:
                say(f"{draft.spec.name} has {size / 1e6:.1f} MB: more than ships")

    finished = trainer.run(gate, checkpoint, write)
    reports = trainer.gate_reports(gate) if gate is not None and finished else None
    write(reports)
    for draft, found in zip(trainer.drafts, reports or (), strict=False):
        say(f"{draft.spec.name}\n{table(found)}")
    say("done" if finished else "stopped early: the same command goes on")


def _train_options(args: argparse.Namespace, specs: Sequence[DraftSpec]) -> TrainOptions:
    batches = BatchOptions(
        tokens=args.tokens,
        block_tokens=args.block_tokens,
        density=args.density,
        max_anchors=args.max_anchors,
        max_length=args.max_length,
        block=max((spec.block for spec in specs), default=8),
    )
    return TrainOptions(
        minutes=args.minutes,
        steps=args.steps,
        stop_after_minutes=args.stop_after_minutes,
        lr=args.lr,
        warmup=args.warmup,
        weight_decay=args.weight_decay,
        optimizer=args.optimizer,
        seed=args.seed,
        gate_minutes=args.gate_minutes,
        checkpoint_minutes=args.checkpoint_minutes,
        batches=batches,
        loss=_loss_options(args),
    )


def _check_data(data: Sequence[Path], directory: Path) -> str:
    """Data of other weights would teach another model's text."""
    sha = weights_sha256(directory)
    for path in data:
        manifest = read_manifest(path)
        if manifest is not None and manifest.target_sha256 != sha:
            raise CheckpointError(f"data {path.name!r} were made by other target weights")
    return sha


def _facts(
    args: argparse.Namespace, sha: str, data: Sequence[Path], options: TrainOptions
) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for path in data:
        manifest = read_manifest(path)
        for name, value in (manifest.counts if manifest else {}).items():
            counts[name] = counts.get(name, 0) + value
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "target weights sha256": sha,
        "documents": counts.get("train_documents", 0),
        "answer tokens": counts.get("train_answer_tokens", 0),
        "seed": options.seed,
        "optimiser": f"{options.optimizer}, lr {options.lr:g}, cosine to {options.final_lr:g}",
        "loss": f"{options.loss.mix}, from {options.loss.late_from:g} on {options.loss.late_mix}, "
        f"{options.loss.weighting}",
        "trained on": gpu,
        "command": f"{PROGRAM} {shlex.join(args.argv)}",
    }


def _gate(
    args: argparse.Namespace, net: TargetNet, chat: Chat | None, data: Sequence[Path]
) -> Gate | None:
    """Prompts of a file, or those held out from the data, by where they came from."""
    if args.gate_minutes <= 0:
        return None
    if args.gate_prompts:
        prompts = eval_prompts(args.gate_prompts, chat, args.gate_count)
    else:
        try:
            corpus = load_corpus(data, "holdout")
        except CheckpointError:
            say("no gate: the data hold out nothing")
            return None
        prompts = _held(corpus, args.gate_count)
    return Gate(prompts, stop_ids(net, chat), args.gate_new)


def _held(corpus: Corpus, per_set: int) -> list[EvalPrompt]:
    taken: dict[str, int] = {}
    found = []
    for i in range(len(corpus)):
        name = KINDS[int(corpus.kinds[i])]
        if taken.get(name, 0) < per_set:
            taken[name] = taken.get(name, 0) + 1
            found.append(EvalPrompt(name, corpus.prompt(i).tolist()))
    return found
