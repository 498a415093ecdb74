"""`specwire train-draft` hands everything on."""

from __future__ import annotations

import subprocess
import sys

import typer
from typer.testing import CliRunner

from draft_svc.training.commands import register


def test_train_draft_passes_options_and_exit_status() -> None:
    app = typer.Typer()
    register(app)
    app.command("other")(lambda: None)
    runner = CliRunner()
    shown = runner.invoke(app, ["train-draft", "toy", "--help"])
    assert shown.exit_code == 0 and "--method" in shown.output
    wrong = runner.invoke(app, ["train-draft", "evaluate", "--draft", "x"])
    assert wrong.exit_code == 2
    listed = runner.invoke(app, ["--help"])
    assert "train-draft" in listed.output


def test_registering_loads_no_torch() -> None:
    code = "import sys, draft_svc.training.commands; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
