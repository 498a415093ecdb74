"""Options that several commands share, and what they have in common when they reach a server."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, NoReturn

import typer

from coordinator.local import LocalDeployment, LocalOptions
from coordinator.runtime_file import running_address

Address = Annotated[
    str,
    typer.Option(
        envvar="SPECWIRE_ADDRESS",
        help="Coordinator: host:port or unix:/path. Unset: a deployment started by `specwire up`, "
        "or one of its own for the duration of the command.",
    ),
]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens to generate.")]
Temperature = Annotated[
    float | None, typer.Option(min=0.0, help="0 is greedy. Unset: the server's default, 1.0.")
]
TopK = Annotated[int | None, typer.Option(min=0, help="Keep the K likeliest tokens; 0: all.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest share of tokens: (0, 1].")]
Seed = Annotated[
    int | None, typer.Option(min=0, help="Same seed, same tokens, whichever drafter is attached.")
]
Stop = Annotated[
    list[str] | None, typer.Option(help="End before this text; may be given several times.")
]
Method = Annotated[
    str,
    typer.Option(help="`plain`, or a drafter such as `dflash`, `ngram`. Unset: the default one."),
]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens", "-k", min=0, help="Draft tokens a round. Unset: the server's."
    ),
]
Exactness = Annotated[
    str,
    typer.Option(
        help="`exact`: speculation never changes a token. `fast`: kernel shapes follow the work. "
        "Unset: the server's default."
    ),
]


def say(line: str) -> None:
    """Progress and remarks go to stderr: stdout is for results."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def coordinator_address(address: str) -> Iterator[str]:
    """The address given, or a running default deployment, or an own one for this block."""
    found = address or running_address()
    if found:
        yield found
        return
    with terminated_cleanly(), LocalDeployment(LocalOptions(), say) as deployment:
        yield deployment.address


@contextmanager
def terminated_cleanly() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP unwind the stack, so that children and sockets are removed."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, _unwind) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def colour_wanted() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
