"""`specwire train-draft`, registered through the entry-point group `specwire.commands`."""

from __future__ import annotations

import typer

_ANY = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
    "allow_interspersed_args": False,
}


def train_draft(context: typer.Context) -> None:
    """Train a draft for a target: generate, train, evaluate, export, toy (each with --help)."""
    # torch is not for those who only want the other commands.
    from draft_svc.training.cli import main

    status = main(context.args or ["--help"])
    if status:
        raise typer.Exit(status)


def register(app: typer.Typer) -> None:
    app.command("train-draft", context_settings=_ANY)(train_draft)
