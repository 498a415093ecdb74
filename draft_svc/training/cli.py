"""`python -m draft_svc.training`: generate, train, evaluate, export, toy."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from draft_svc.training.judging import run_evaluate, run_export
from draft_svc.training.making import PROGRAM, run_generate, run_train
from draft_svc.training.opening import DTYPES, TEMPLATES, say
from draft_svc.training.toy import ToyOptions, run_toy
from engine.errors import CheckpointError


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
    add("--dtype", choices=sorted(DTYPES), help="bfloat16 on a GPU, float32 on the CPU")
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
    add("--templates", nargs="+", choices=TEMPLATES, default=["chat"], help="none: as it is")
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
