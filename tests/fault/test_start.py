"""What stops a service from starting is one line that names it, and exit status 2.

Family: start-up. A wrong setting or checkpoint that is taken silently shows much later, as bad text
or as a crash under load (WC-30).
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault import checkpoints
from tests.fault.checkpoints import Break
from tests.fault.starter import Ended, Starter

PREFIXES = {
    "target_svc": "SPECWIRE_TARGET_",
    "draft_svc": "SPECWIRE_DRAFT_",
    "coordinator": "SPECWIRE_COORDINATOR_",
}
SERVICES = list(PREFIXES)


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    with Starter(tmp_path_factory.mktemp("logs")) as made:
        yield made


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_tiny(tmp_path_factory.mktemp("checkpoints") / "good")


def refused(ended: Ended, *parts: str) -> None:
    """One line for the user that holds all parts; no traceback."""
    assert ended.status == 2, ended.output
    assert ended.last_line.startswith("error: "), ended.output
    assert [part for part in parts if part not in ended.last_line] == [], ended.last_line
    assert "Traceback" not in ended.output and "Value error" not in ended.output


# -- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", SERVICES)
def test_unknown_settings(starter: Starter, module: str, tmp_path: Path) -> None:
    refused(starter.run(module, "--addresses", "x"), "--addresses x", "--help")
    variable = PREFIXES[module] + "ADDRESSES"
    ended = starter.run(module, environment={variable: "x"})
    refused(ended, variable, "accepted: ", PREFIXES[module] + "ADDRESS", "--help")
    file = tmp_path / "s.yaml"
    file.write_text("addresses: x\n")
    said = f"addresses in {file} is not a setting of this service; accepted: address"
    refused(starter.run(module, "--config", str(file)), said)


@pytest.mark.parametrize("module", SERVICES)
def test_values_of_the_wrong_type(starter: Starter, module: str, tmp_path: Path) -> None:
    refused(starter.run(module, "--drain-ms", "soon"), "drain_ms is 'soon'", "a valid integer")
    environment = {PREFIXES[module] + "REFLECTION": "perhaps"}
    ended = starter.run(module, environment=environment)
    refused(ended, "reflection is 'perhaps'", "a valid boolean")
    file = tmp_path / "s.json"
    file.write_text(json.dumps({"drain_ms": [1]}))
    refused(starter.run(module, "--config", str(file)), "drain_ms is [1]", "a valid integer")


@pytest.mark.parametrize("module", SERVICES)
def test_values_out_of_range(starter: Starter, module: str) -> None:
    ended = starter.run(module, "--drain-ms", "-1")
    refused(ended, "drain_ms is '-1'", "accepted: greater than or equal to 0")
    ended = starter.run(module, "--metrics-port", "65536")
    refused(ended, "metrics_port is '65536'", "accepted: less than or equal to 65535")
    ended = starter.run(module, "--log-level", "loud")
    refused(ended, "log_level is 'loud'", "'debug', 'info', 'warning' or 'error'")


@pytest.mark.parametrize("module", SERVICES)
def test_settings_files_that_cannot_be_read(starter: Starter, module: str, tmp_path: Path) -> None:
    refused(starter.run(module, "--config", str(tmp_path / "none.yaml")), "config is", "No such")
    for name, text in (("s.toml", "= 1"), ("s.json", "{"), ("s.yaml", "[1, 2]"), ("s.cfg", "")):
        (tmp_path / name).write_text(text)
        refused(starter.run(module, "--config", str(tmp_path / name)), "config is", "accepted: a")


@pytest.mark.parametrize(
    ("module", "argv", "parts"),
    [
        ("draft_svc", "--methods magic", ["'magic'", "ngram, hybrid, draft_model, dflash"]),
        ("draft_svc", "--methods ngram --default-method dflash", ["default_method", "ngram"]),
        ("draft_svc", "--ngram-min 5 --ngram-max 4", ["ngram_min must not exceed ngram_max"]),
        ("target_svc", "--exactness nearly", ["exactness is 'nearly'", "'exact' or 'fast'"]),
        ("target_svc", "--dtype int3", ["dtype is 'int3'", "'bfloat16' or 'float32'"]),
        ("target_svc", "--page-tokens 0", ["page_tokens is '0'", "greater than or equal to 1"]),
        ("target_svc", "--max-length 1", ["max_length is '1'", "greater than or equal to 2"]),
        ("coordinator", "--lease-ms 1", ["lease_ms is '1'", "greater than or equal to 300"]),
        ("coordinator", "--max-sessions 0", ["max_sessions is '0'", "greater than or equal to 1"]),
        ("coordinator", "--exactness nearly", ["exactness is 'nearly'", "'exact' or 'fast'"]),
    ],
)
def test_settings_of_one_service(
    starter: Starter, module: str, argv: str, parts: list[str]
) -> None:
    refused(starter.run(module, *argv.split()), *parts)


# -- addresses -----------------------------------------------------------------------------------


@pytest.mark.parametrize("module", SERVICES)
def test_addresses_that_are_taken(starter: Starter, module: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        refused(starter.run(module, "--address", address), address, "in use")
        port = str(taken.getsockname()[1])
        ended = starter.run(module, "--address", f"unix:{tmp_path}/s", "--metrics-port", port)
        refused(ended, port, "in use")
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(f"{tmp_path}/live")
        live.listen()
        refused(starter.run(module, "--address", f"unix:{tmp_path}/live"), "in use")
    assert (tmp_path / "live").exists(), "a live socket is left where it is"


@pytest.mark.parametrize("module", SERVICES)
@pytest.mark.parametrize(
    "address",
    [
        "203.0.113.7:1",  # no address of this machine
        "127.0.0.1:99999",
        "127.0.0.1",
        "unix:/nonexistent/s",
        f"unix:/tmp/{'x' * 120}",
    ],
)
def test_addresses_that_cannot_be(starter: Starter, module: str, address: str) -> None:
    ended = starter.run(module, "--address", address)
    refused(ended, f"address is '{address}'"[:100], "accepted: host:port of this machine")


def test_the_real_command_says_the_same() -> None:
    """Once without the forking process between."""
    command = [sys.executable, "-m", "coordinator", "--address", "203.0.113.7:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    refused(Ended(done.returncode, done.stdout + done.stderr), "address is '203.0.113.7:1'")


# -- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("breaks", "parts"),
    [
        (checkpoints.without("config.json"), ["config.json"]),
        (checkpoints.text("config.json", "{"), ["config.json", "JSON"]),
        (checkpoints.config(model_type="gpt2"), ["model_type", "'gpt2'", "accepted: ", "llama"]),
        (checkpoints.config(num_hidden_layers="x"), ["num_hidden_layers", "'x'", "accepted: "]),
        (checkpoints.without(checkpoints.WEIGHTS), [checkpoints.WEIGHTS]),
        (checkpoints.cut, [checkpoints.WEIGHTS, "cannot be read"]),
        (checkpoints.garbage, [checkpoints.WEIGHTS, "cannot be read"]),
        (checkpoints.empty, [checkpoints.WEIGHTS, "cannot be read"]),
        (checkpoints.missing_shard, ["missing", "model-00001-of-00002.safetensors"]),
        (
            checkpoints.tensors(checkpoints.missing_tensor),
            ["model.layers.2.mlp.up_proj.weight is missing", "[112, 64]"],
        ),
        (
            checkpoints.tensors(checkpoints.extra_tensor),
            ["not part of the model", "model.layers.9.mlp.up_proj.weight"],
        ),
        (checkpoints.tensors(checkpoints.wrong_shape), ["model.norm.weight", "[7]", "[64]"]),
        (checkpoints.without("tokenizer.json"), ["tokenizer.json"]),
        (checkpoints.text("tokenizer.json", "{"), ["tokenizer.json", "JSON"]),
        (checkpoints.text("tokenizer.json", '{"model": 3}'), ["tokenizer.json", "malformed"]),
        (lambda folder: checkpoints.words(folder, 200), ["tokenizer does not belong", "199"]),
    ],
    ids=[
        "no config",
        "config of no JSON",
        "unknown family",
        "config with a wrong type",
        "no weights",
        "weights cut off",
        "weights of something else",
        "empty weights",
        "missing shard",
        "missing tensor",
        "extra tensor",
        "wrong shape",
        "no tokenizer",
        "tokenizer of no JSON",
        "tokenizer of another form",
        "tokenizer of a larger model",
    ],
)
def test_checkpoints_of_the_target(
    starter: Starter, good: Path, breaks: Break, parts: list[str], tmp_path: Path
) -> None:
    """DF-18, WC-17, WC-30: strict in both directions, before anything is served."""
    folder = checkpoints.copy(good, tmp_path / "broken", breaks)
    ended = starter.run("target_svc", "--address", f"unix:{tmp_path}/s", "--model", str(folder))
    refused(ended, *parts)
    others = ended.last_line.replace(str(folder), "")
    assert str(tmp_path) not in others, "no path but what was typed"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("--model /nonexistent/m", ["model '/nonexistent/m' does not exist", "accepted: "]),
        ("--model {good} --device tpu", ["'tpu'", "accepted: "]),
        ("--model {good} --attention-backend NOPE", ["NOPE", "CPU_ATTN", "TORCH_SDPA"]),
        (
            "--model {good} --kv-memory-mb 1 --page-tokens 4096",
            ["kv_memory_mb = 1", "accepted: 4 or more"],
        ),
        ("--model {good} --kv-pages 1000000000000", ["kv_pages", "accepted: what this machine"]),
        ("--model {good} --max-length 513", ["max_length = 513", "accepted: 2 to 512"]),
    ],
)
def test_what_the_target_cannot_do(
    starter: Starter, good: Path, argv: str, parts: list[str], tmp_path: Path
) -> None:
    words = argv.format(good=good).split()
    refused(starter.run("target_svc", "--address", f"unix:{tmp_path}/s", *words), *parts)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("--draft /nonexistent/d --target {good}", ["draft is '/nonexistent/d'", "accepted: "]),
        ("--draft {good} --target {good}", ["dflash", "architectures", "speculators_model_type"]),
        ("--draft default --target {good}", ["dflash", "hidden_size", "576", "64"]),
        ("--target /nonexistent/m", ["model '/nonexistent/m' does not exist", "accepted: "]),
    ],
)
def test_checkpoints_of_the_draft(
    starter: Starter, good: Path, argv: str, parts: list[str], tmp_path: Path
) -> None:
    """WC-15, WC-30: a draft that cannot be loaded ends the service; it never turns into plain."""
    words = ["--methods", "ngram,dflash", *argv.format(good=good).split()]
    refused(starter.run("draft_svc", "--address", f"unix:{tmp_path}/s", *words), *parts)
