"""`specwire up`: the embedded default, until it is told to stop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from coordinator import runtime_file
from coordinator.local import (
    COLOCATED_METHOD,
    LocalDeployment,
    LocalOptions,
    colocatable,
    parse_extra,
)
from coordinator.options import say
from coordinator.signals import STOPS, at_signals, terminated_cleanly
from specwire.errors import Reason, SpecwireError

WATCH_S = 0.2
_COLOCATE = "--colocate"


class UpCommand(TyperCommand):
    """`--colocate` without a method means the default one; the library has no such option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        whole = [
            f"{arg}={COLOCATED_METHOD}" if arg == _COLOCATE and behind.startswith("-") else arg
            for arg, behind in pairwise([*args, "-"])
        ]
        return super().parse_args(ctx, whole)


def up(
    model: Annotated[
        str, typer.Option(help="Target: a Hugging Face directory, a .gguf file, or `default`.")
    ] = "default",
    draft: Annotated[
        str,
        typer.Option(help="Draft checkpoint: a directory, or `default`, the method's own."),
    ] = "default",
    colocate: Annotated[
        str,
        typer.Option(
            _COLOCATE,
            metavar="[METHOD]",
            help="The draft in the target's process, and no draft service: `dflash` (also where no "
            "method is named), `dspark`.",
        ),
    ] = "",
    listen: Annotated[
        str, typer.Option(help="Where to serve, such as 127.0.0.1:7070. Unset: a UNIX socket.")
    ] = "",
    exactness: Annotated[
        str, typer.Option(help="`exact` or `fast`, for requests that do not say.")
    ] = "exact",
    threads: Annotated[int, typer.Option(min=0, help="Threads a service; 0: all cores.")] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other flag of a service: target.kv-memory-mb=256."),
    ] = None,
) -> None:
    """Start target, draft and coordinator on this machine and serve until Ctrl-C.

    Other commands find the deployment by themselves: the newest one, where several run. Each
    service also starts alone, on any host: `python -m target_svc --help`,
    `python -m draft_svc --help`, `python -m coordinator --help`.

    Examples:

    \b
      specwire up
      specwire up --colocate
      specwire up --colocate dspark
      specwire up --listen 127.0.0.1:7070
      specwire up --model ./SmolLM2-360M --set target.kv-memory-mb=512
    """
    if exactness not in ("exact", "fast"):
        raise SpecwireError.field("--exactness", exactness, "exact, fast", Reason.SETTINGS_INVALID)
    if colocate and colocate not in (known := colocatable()):
        accepted = ", ".join(known) or "nothing: no installed package has one"
        raise SpecwireError.field(_COLOCATE, colocate, accepted, Reason.SETTINGS_INVALID)
    options = LocalOptions(
        model=model,
        draft=draft,
        exactness=exactness,
        threads=threads,
        colocate=colocate,
        listen=listen,
        extra=parse_extra(settings or ()),
    )
    stop = threading.Event()
    # While loading, a signal unwinds the start; afterwards it asks for an orderly end.
    with (
        terminated_cleanly(),
        LocalDeployment(options, say) as deployment,
        at_signals(stop.set, *STOPS),
        _published(deployment.address) as found_by_itself,
    ):
        print(f"serving at {deployment.address}", flush=True)
        say(_how_to_use(deployment.address, found_by_itself))
        say(f"Logs, until then: {deployment.logs}")
        while not stop.wait(WATCH_S):
            deployment.mend()
        say("stopping")


def _how_to_use(address: str, found_by_itself: bool) -> str:
    flag = "" if found_by_itself else f" --address {address}"
    return (
        f"  specwire chat{flag}\n"
        f"  specwire generate{flag} --max-tokens 32 'The harbour at dawn'\n"
        f"  from specwire.client import Client; Client({address!r})\nCtrl-C stops."
    )


@contextmanager
def _published(address: str) -> Iterator[bool]:
    """Tells the other commands, which use the newest deployment; yields whether they know."""
    before = runtime_file.running_address()
    with ExitStack() as stack:
        try:
            stack.enter_context(runtime_file.published(address))
        except OSError as error:
            say(f"other commands need --address: {error.strerror or error}")
            yield False
            return
        if before is not None:
            say(f"other commands use this deployment now; until it ends, {before} needs --address")
        yield True
