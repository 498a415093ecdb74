"""The commands with the real model, as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.local import LocalDeployment

pytestmark = pytest.mark.model

SPECWIRE = (sys.executable, "-m", "coordinator.cli")


def specwire(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SPECWIRE, *arguments], input=given, capture_output=True, text=True, check=False
    )


@contextmanager
def running_up(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`specwire up` once it says that it serves."""
    process = subprocess.Popen(
        [*SPECWIRE, "up", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving at ")
        yield process
    finally:
        process.kill()
        process.communicate()


def child_pids(pid: int) -> dict[str, int]:
    """Pids of the services by module name."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    commands = {int(p): Path(f"/proc/{p}/cmdline").read_bytes().split(b"\0") for p in pids}
    return {words[2].decode(): found for found, words in commands.items()}


def left_in(folder: Path) -> list[str]:
    return [str(path) for path in folder.glob("specwire-*/*")]


def test_up_serves_the_other_commands_until_it_is_told_to_stop(private_runtime: Path) -> None:
    with running_up() as process:
        info = json.loads(specwire("info", "--json").stdout)
        assert {worker["role"]: worker["state"] for worker in info["workers"]} == {
            "target": "ready",
            "draft": "ready",
        }
        assert info["default_method"] == "dflash" and info["default_exactness"] == "exact"

        options = ("--temperature", "0", "--max-tokens", "12", "The capital of France is")
        text = specwire("generate", *options)
        assert text.returncode == 0 and "Paris" in text.stdout
        assert text.stderr.startswith("[12 tokens, ") and "loading" not in text.stderr
        record = json.loads(specwire("generate", "--json", "--method", "plain", *options).stdout)
        assert record["text"] == text.stdout.rstrip("\n")
        assert record["acceptance"]["draft_tokens"] == 0

        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert left_in(private_runtime) == []


def test_up_ends_with_an_error_when_a_service_dies(private_runtime: Path) -> None:
    with running_up("--set", "draft.methods=ngram") as process:
        children = child_pids(process.pid)
        assert set(children) == {"target_svc", "draft_svc", "coordinator"}
        os.kill(children["target_svc"], signal.SIGKILL)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 1
        assert "error: the target ended with signal 9" in errors and "Traceback" not in errors
    assert left_in(private_runtime) == []


def test_chat_keeps_the_conversation_and_marks_accepted_text(
    deployment: LocalDeployment, private_runtime: Path
) -> None:
    arguments = ("--address", deployment.address, "--temperature", "0", "--max-tokens", "24")
    lines = "Say hello.\nCount from one to ten.\n/exit\n"
    done = specwire("chat", *arguments, "--mark", "brackets", given=lines)
    assert done.returncode == 0
    assert "[" in done.stdout  # some of the drafter's tokens were right
    statistics = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert len(statistics) == 2 and all("dflash" in line for line in statistics)


@pytest.mark.parametrize("modes", ["plain,ngram,dflash", "draft"])
def test_bench_writes_its_report(
    deployment: LocalDeployment, private_runtime: Path, modes: str
) -> None:
    prompts, out = private_runtime / "prompts.jsonl", private_runtime / "out.json"
    lines: Sequence[dict[str, object]] = [
        {"prompt": "Name three rivers.", "category": "chat"},
        {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "category": "maths"},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("--prompts", str(prompts), "--modes", modes, "--max-tokens", "16")
    done = specwire("bench", *arguments, "--json", str(out), "--address", deployment.address)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert list(report["modes"]) == modes.split(",")
    assert set(report["environment"]) >= {"cpu", "cores", "model", "prompts_sha256", "exactness"}
    for entry in report["modes"].values():
        assert entry["prompts"] == 2 and set(entry["by_category"]) == {"chat", "maths"}
        assert entry["identical"] == (2 if "plain" in modes else None)
        assert entry["tau"] >= 1.0 and entry["decode_tokens_per_s"] > 0
