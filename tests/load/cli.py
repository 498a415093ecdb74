"""Flags and frame that the three load generators share."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from coordinator.local import LocalDeployment, LocalOptions, parse_extra
from specwire.errors import Reason, SpecwireError
from tests.load.openloop import Plan, Run
from tests.load.report import report, table

Load = Callable[[str, Plan, argparse.Namespace], Awaitable[Run]]
_COMMON = {"address", "rate", "duration_s", "seed", "drain_s", "json", "set", "model"}


def parser(service: str, text: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=f"python -m tests.load.{service}",
        description=text,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument(
        "--address", default="", help=f"the {service}; unset: a deployment of the default model"
    )
    made.add_argument(
        "--model", default="default", help="model of the deployment, if none is given"
    )
    made.add_argument(
        "--set", action="append", default=[], help="its other flags: target.kv-memory-mb=256"
    )
    made.add_argument("--rate", type=float, default=2.0, help="sessions a second, on average")
    made.add_argument("--duration-s", type=float, default=30.0, help="seconds of arrivals")
    made.add_argument("--drain-s", type=float, default=30.0, help="seconds for the last to end")
    made.add_argument("--seed", type=int, default=0, help="of arrivals, prompts and drafts")
    made.add_argument("--prompt-tokens", type=int, default=64, help="length of synthetic prompts")
    made.add_argument("--new-tokens", type=int, default=32, help="tokens a session emits")
    made.add_argument("--json", metavar="FILE", help="write the report there; -: print it")
    return made


def main(
    service: str, made: argparse.ArgumentParser, load: Load, argv: Sequence[str] | None
) -> int:
    """Runs a generator from its flags. Exit status 2: it could not start."""
    options = made.parse_args(argv)
    try:
        return _run(service, load, options)
    except SpecwireError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2


def _run(service: str, load: Load, options: argparse.Namespace) -> int:
    for name in ("rate", "duration_s", "prompt_tokens", "new_tokens"):
        if getattr(options, name) <= 0:
            flag = "--" + name.replace("_", "-")
            raise SpecwireError.field(flag, getattr(options, name), "more than 0")
    plan = Plan(options.rate, options.duration_s, options.seed, options.drain_s)
    chosen = LocalOptions(model=options.model, extra=parse_extra(options.set))
    with nullcontext() if options.address else LocalDeployment(chosen, _say) as local:
        addresses = {
            "target": lambda: local.target_address,
            "draft": lambda: local.draft_address,
            "coordinator": lambda: local.address,
        }
        address = options.address or addresses[service]()
        run = asyncio.run(load(address, plan, options))
    own = {k: v for k, v in vars(options).items() if k not in _COMMON}
    found = report(service, address, plan, own, run)
    _write(found, options.json)
    return 0


def _write(found: dict[str, Any], file: str | None) -> None:
    text = json.dumps(found, indent=2)
    if file == "-":
        print(text)
        return
    if file:
        try:
            Path(file).write_text(text + "\n")
        except OSError as error:
            raise SpecwireError.field("--json", file, f"a file ({error.strerror})") from error
    print(table(found))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def fits(name: str, value: int, most: int, whose: str) -> None:
    """Refuses an option that the service, by its own word, does not take; 0: it has no limit."""
    if most and value > most:
        raise SpecwireError.field(
            name, value, f"at most {most}, by the {whose}", Reason.FIELD_INVALID
        )
