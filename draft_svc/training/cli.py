"""`python -m draft_svc.training`: generate, train, evaluate, export, toy."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from draft_svc.training.batches import BatchOptions
from draft_svc.training.chat import Chat, load_chat, prompt_ids, read_prompts
from draft_svc.training.draft import DraftNet, DraftSpec, parse_spec
from draft_svc.training.evaluate import EvalPrompt, SetReport, as_json, evaluate, table
from draft_svc.training.export import MAX_BYTES, export, load_export, read_spec
from draft_svc.training.generate import GenerateOptions, generate, weights_sha256
from draft_svc.training.kernels import LossMix
from draft_svc.training.net import TargetNet, load_target
from draft_svc.training.objective import LossOptions
from draft_svc.training.prompts import KINDS
from draft_svc.training.shards import Corpus, Manifest, load_corpus, read_manifest
from draft_svc.training.toy import ToyOptions, run_toy
from draft_svc.training.trainer import Gate, Trainer, TrainOptions
from engine.errors import CheckpointError
from engine.weights import read_json

PROGRAM = "python -m draft_svc.training"
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def say(line: str) -> None:
    print(line, flush=True)


def target_directory(reference: str) -> Path:
    """A directory as it is; a GGUF file or "default" through the importer (needs `gguf`)."""
    path = Path(reference).expanduser()
    if path.is_dir():
        return path
    from engine.default_model import resolve_model

    return resolve_model(reference).directory


def open_target(args: argparse.Namespace) -> tuple[Path, TargetNet, Chat | None]:
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = _DTYPES[args.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    directory = target_directory(args.target)
    try:
        chat: Chat | None = load_chat(directory)
    except CheckpointError as error:
        say(f"no chat: {error}")
        chat = None
    net = load_target(directory, device, dtype)
    say(f"target {directory.name}: {net.config.layer_count} layers on {device}, {dtype}")
    return directory, net, chat


def stop_ids(net: TargetNet, chat: Chat | None) -> tuple[int, ...]:
    return net.config.eos_token_ids or (chat.eos_ids if chat else ())


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


def eval_prompts(
    path: Path, chat: Chat | None, per_set: int, categories: Sequence[str] = ()
) -> list[EvalPrompt]:
    """The first `per_set` prompts (0: all) of every category of a prompt file."""
    taken: dict[str, int] = {}
    found = []
    for row in read_prompts(path):
        name = str(row.get("category", "all"))
        if categories and name not in categories:
            continue
        if per_set and taken.get(name, 0) >= per_set:
            continue
        taken[name] = taken.get(name, 0) + 1
        found.append(EvalPrompt(name, prompt_ids(chat, row)))
    return found


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


def load_draft(path: Path, net: TargetNet) -> DraftNet:
    draft = DraftNet(read_spec(path, path.name, net.config), net, 0)
    load_export(path, draft)
    return draft


def run_evaluate(args: argparse.Namespace) -> None:
    _, net, chat = open_target(args)
    prompts = eval_prompts(args.prompts, chat, args.per_set, args.categories)
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


def run_toy_command(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    out = Path(args.out)
    options = ToyOptions(method=args.method, seed=args.seed)
    report = run_toy(out, options, say)
    say(f"tau {report.tau:.2f} at T = 1, n-gram lookup {report.ngram_tau:.2f}")
    say(f"target in {out / 'target'}, draft in {out / 'draft'}")


def _common(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", default="default", help="directory, .gguf file or default")
    add("--device", help="cuda or cpu; the GPU if there is one")
    add("--dtype", choices=sorted(_DTYPES), help="bfloat16 on a GPU, float32 on the CPU")
    add("--seed", type=int, default=0)


_EXAMPLES = """Examples:
  specwire train-draft toy --out toy
  specwire train-draft generate --target DIR --out data --minutes 8
  specwire train-draft train --target DIR --data data --out run --draft dspark,rank=64
  specwire train-draft evaluate --target DIR --draft run/dspark --prompts prompts.jsonl
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Train a draft for a target on the target's own text.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)

    sub = commands.add_parser("generate", help="documents from the target itself")
    _common(sub)
    add = sub.add_argument
    add("--out", required=True, help="data directory; an existing one is added to")
    add("--minutes", type=float, default=5.0)
    add("--answer-tokens", type=int, default=10**12, help="stop after so many kept ones")
    add("--slots", type=int, default=1024 if torch.cuda.is_available() else 16)
    add("--max-length", type=int, default=1024, help="prompt and answer together")
    add("--max-new", type=int, default=384)
    add("--greedy-share", type=float, default=0.7)
    add("--temperature", type=float, default=0.8, help="of the answers that are not greedy")
    add("--passage-share", type=float, default=0.15, help="answers that become a long prompt")
    add("--holdout", type=float, default=0.01, help="share of prompts kept from training")
    add("--prompts", type=Path, help="jsonl with prompt or messages")
    add("--prompts-only", action="store_true", help="no prompts by the target")
    add("--eager", action="store_true", help="no CUDA graph")
    add("--stride", type=int, default=16, help="decode steps between looks at the slots")
    sub.set_defaults(run=run_generate)

    sub = commands.add_parser("train", help="drafts from data")
    _common(sub)
    add = sub.add_argument
    add("--data", nargs="+", required=True)
    add("--out", required=True, help="one folder per draft, and trainer.pt to resume")
    add("--draft", nargs="*", default=[], help="dflash,layers=2,mask=16 or dspark,rank=64,...")
    add("--init-from", nargs="*", default=[], help="exported drafts to go on from")
    add("--restart", action="store_true", help="ignore trainer.pt")
    add("--minutes", type=float, default=10.0, help="of training, over all calls")
    add("--stop-after-minutes", type=float, default=0.0, help="end this call, to be resumed")
    add("--steps", type=int, default=0, help="schedule by steps instead of minutes")
    add("--lr", type=float, default=1.5e-3)
    add("--warmup", type=float, default=0.02)
    add("--weight-decay", type=float, default=0.0)
    add("--optimizer", choices=("adamw", "muon"), default="adamw")
    add("--loss", default="ce=1", help="weights of ce, kl, tv")
    add("--late-loss", default="ce=0.1,tv=0.9")
    add("--late-from", type=float, default=1.0, help="share of the run where late-loss begins")
    add("--weighting", choices=("decay", "dpace"), default="decay")
    add("--decay", type=float, default=4.0)
    add("--alpha", type=float, default=0.5, help="smoothing of dpace")
    add("--tokens", type=int, default=32768, help="padded target tokens of a step")
    add("--block-tokens", type=int, default=49152, help="block slots of a step")
    add("--density", type=float, default=0.25, help="anchors per answer token")
    add("--max-anchors", type=int, default=128)
    add("--max-length", type=int, default=1024)
    add("--gate-minutes", type=float, default=2.0, help="0: no gate")
    add("--gate-prompts", type=Path, help="jsonl; the data's own hold-out without it")
    add("--gate-count", type=int, default=8, help="prompts of a set")
    add("--gate-new", type=int, default=128)
    add("--checkpoint-minutes", type=float, default=4.0)
    sub.set_defaults(run=run_train)

    sub = commands.add_parser("evaluate", help="tau of the real loop on prompt files")
    _common(sub)
    add = sub.add_argument
    add("--draft", nargs="+", required=True, help="exported drafts")
    add("--prompts", type=Path, required=True, help="jsonl with prompt and category")
    add("--categories", nargs="*", default=[])
    add("--per-set", type=int, default=0, help="prompts of a category; 0: all")
    add("--max-new", type=int, default=256)
    add("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    add("--together", type=int, default=64, help="prompts in flight")
    add("--out", help="JSON file")
    sub.set_defaults(run=run_evaluate)

    sub = commands.add_parser("export", help="a draft with a model card of measured figures")
    _common(sub)
    add = sub.add_argument
    add("--draft", required=True)
    add("--out", required=True)
    add("--figures", type=Path, help="JSON of `evaluate`")
    add("--fact", action="append", default=[], help="key=value line of the card")
    sub.set_defaults(run=run_export)

    sub = commands.add_parser("toy", help="all of it on a CPU in under two minutes")
    add = sub.add_argument
    add("--out", required=True, help="target, data and draft go here")
    add("--method", choices=("dflash", "dspark"), default="dspark")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=2)
    sub.set_defaults(run=run_toy_command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 2 the call was wrong."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(arguments)
    args.argv = arguments
    try:
        args.run(args)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
