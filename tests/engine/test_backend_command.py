"""`specwire backends` from the outside: config.json directories in, exit code and JSON out."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from coordinator import cli
from engine.attention.checkpoint import parse_checkpoint
from engine.attention.listing import markdown
from engine.attention.quirks import QUIRKS
from engine.commands import register
from engine.errors import CheckpointError

ROOT = Path(__file__).parents[2]
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
QWEN3 = LLAMA | {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "sliding_window": None,
    "use_sliding_window": False,
}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
}
SPARSE = DEEPSEEK | {"model_type": "deepseek_v32", "index_topk": 2048}
V4 = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "sliding_window": 128,
    "dspark_block_size": 5,
    "torch_dtype": "bfloat16",
}
DFLASH = QWEN3 | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 3,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1]},
}
S, F = "sliding_attention", "full_attention"
MIXED = {"layer_types": [S, S, F], "sliding_window": 16}


def nested(**values: Any) -> dict[str, Any]:
    return DFLASH | {"dflash_config": {**DFLASH["dflash_config"], **values}}


SPECULATORS = {
    "speculators_model_type": "dflash",
    "architectures": ["DFlashSpeculator"],
    "transformer_layer_config": QWEN3 | {"num_hidden_layers": 3} | MIXED,
    "block_size": 8,
    "sliding_window_non_causal": False,
}
# The six styles of public checkpoints, and (causal, window) of each layer.
STYLES: dict[str, tuple[dict[str, Any], list[tuple[bool, int | None]]]] = {
    "plain": (DFLASH, [(False, None)] * 3),
    "use_swa": (nested(use_swa=True, swa_window_size=16), [(False, 16)] * 3),
    "mixed": (DFLASH | MIXED, [(True, 16), (True, 16), (False, None)]),
    "forced": (
        nested(use_swa=True, swa_window_size=16) | {"layer_types": [F, F, F]},
        [(False, 16)] * 3,
    ),
    "is_causal": (
        DFLASH | MIXED | {"is_causal": False},
        [(False, 16), (False, 16), (False, None)],
    ),
    "speculators": (SPECULATORS, [(True, 16), (True, 16), (False, None)]),
}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """One directory for each model, with a config.json and nothing else."""
    found = {"llama": LLAMA, "qwen3": QWEN3, "mla": DEEPSEEK, "sparse": SPARSE, "v4": V4}
    found |= {name: config for name, (config, _) in STYLES.items()}
    for name, config in found.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path


def call(*arguments: str | Path) -> tuple[int, str, str]:
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    register(app)
    result = CliRunner().invoke(app, ["backends", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def asked(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    code, out, _ = call(*arguments, "--json")
    return code, json.loads(out)


@pytest.mark.parametrize(
    ("model", "device", "chosen", "kv"),
    [
        ("llama", "sm80", "FLASH_ATTN", 4096),
        ("llama", "sm100", "FLASHINFER", 4096),
        ("llama", "sm103", "FLASHINFER", 4096),
        ("qwen3", "sm90", "FLASH_ATTN", 4096),
        ("qwen3", "sm120", "FLASH_ATTN", 4096),
        ("qwen3", "cpu", "CPU_ATTN", 8192),
        ("mla", "sm90", "FLASH_ATTN_MLA", 1152),
        ("mla", "sm100", "FLASHINFER_MLA", 1152),
        ("mla", "sm121", "TRITON_MLA", 1152),
        ("sparse", "sm90", "FLASH_ATTN_MLA_SPARSE", 1152),
        ("sparse", "sm100", "FLASHMLA_SPARSE", 1152),
        ("v4", "sm90", "FLASHMLA_SPARSE_DSV4", 584),
    ],
)
def test_targets(models: Path, model: str, device: str, chosen: str, kv: int) -> None:
    code, found = asked("--device", device, "--role", "target", "--model", models / model)
    assert (code, found["resolved"], found["chosen"]) == (0, True, chosen)
    assert found["kv"]["token_bytes"] == kv and found["query_tokens"] == 8
    decode = "NONE" if device == "cpu" else "FULL"
    assert found["graphs"]["decode"] == decode


@pytest.mark.parametrize("style", STYLES)
def test_the_six_styles_of_drafts(models: Path, style: str) -> None:
    code, found = asked("--device", "sm90", "--role", "draft", "--model", models / style)
    assert (code, found["method"], found["chosen"]) == (0, "dflash", "FLASH_ATTN")
    modes: dict[int, tuple[bool, int | None]] = {}
    for group in found["layers"]:
        modes |= dict.fromkeys(group["layers"], (group["causal"], group["window"]))
    assert [modes[layer] for layer in range(3)] == STYLES[style][1]
    assert found["query_tokens"] == 8


@pytest.mark.parametrize("device", ["sm100", "sm120"])
def test_report_1(models: Path, device: str) -> None:
    common = ["--device", device, "--role", "draft", "--model", models / "plain"]
    common += ["--target", models / "mla", "--dcp", "8"]
    code, found = asked(*common, "--attention-backend", "TRITON_ATTN")
    assert (code, found["chosen"], found["policy"]) == (0, "TRITON_ATTN", "name")
    assert found["graphs"]["decode"] == found["target"]["graphs"]["decode"] == "FULL"
    code, found = asked(*common)
    assert (code, found["chosen"]) == (0, "FLASH_ATTN")
    reasons = {one["name"]: one["reasons"] for one in found["candidates"]}
    assert reasons["FLASHINFER"] == ["non-causal with decode context parallelism not supported"]
    code, found = asked(*common, "--attention-backend", "FLASHINFER")
    assert (code, found["resolved"], found["requested"]) == (2, False, "FLASHINFER")
    assert found["error"].startswith(
        f"Attention backend FLASHINFER cannot run the dflash draft on {device} "
        "(head_size=128, kv=auto, non-causal, dcp=8): {"
    )
    assert found["target"]["resolved"]


def test_report_2(models: Path) -> None:
    common = ["--device", "sm100", "--role", "draft", "--model", models / "v4", "--colocated"]
    common += ["--target", models / "v4", "--target-kv-dtype", "fp8"]
    common += ["--target-attention-backend", "FLASHMLA_SPARSE_DSV4"]
    code, found = asked(*common)
    assert (code, found["policy"], found["chosen"]) == (0, "inherit", "FLASHMLA_SPARSE_DSV4")
    assert found["kv_group"] == "same_cache" and found["kv"] == found["target"]["kv"] | {
        "layers": 3,
        "bytes_per_token": 3 * 584,
    }
    code, found = asked(*common, "--attention-backend", "FLASHINFER_MLA_SPARSE_DSV4")
    assert code == 2 and "512 against 584 bytes a token" in found["error"]
    apart = [one for one in common if one != "--colocated"]
    code, found = asked(*apart, "--attention-backend", "FLASHINFER_MLA_SPARSE_DSV4")
    assert (code, found["kv_group"]) == (0, "private")
    beside = [models / "mixed" if one == models / "v4" and at == 5 else one
              for at, one in enumerate(common)]  # fmt: skip
    code, found = asked(*beside)
    assert (code, found["kv_group"], found["policy"]) == (0, "pooled", "auto")
    assert found["kv"]["page_tokens"] == 256 and found["kv"]["alignment_bytes"] == 576


def test_report_3(models: Path) -> None:
    causal = models / "causal"
    causal.mkdir()
    (causal / "config.json").write_text(json.dumps(DFLASH | {"is_causal": True}))
    common = ["--device", "sm120", "--role", "draft", "--attention-backend", "B12X", "--model"]
    assert asked(*common, causal)[0] == 0
    code, found = asked(*common, models / "plain")
    assert code == 2 and "B12X: [non-causal attention not supported]" in found["error"]
    code, found = asked(*common, models / "mixed")
    text = "sliding window not supported (16) [layers 0, 1: causal, window=16]"
    assert code == 2 and text in found["error"]


def test_vllm_keys(models: Path) -> None:
    config = {
        "method": "dflash",
        "model": str(models / "plain"),
        "num_speculative_tokens": 4,
        "attention_backend": "TRITON_ATTN",
        "kv_cache_dtype": "fp8",
    }
    spec = ["--device", "sm100", "--speculative-config", json.dumps(config)]
    backend = ["--attention-config.backend", "CUTLASS_MLA"]
    code, found = asked(*spec, *backend, "--role", "draft", "--target", models / "mla")
    assert (code, found["chosen"], found["query_tokens"]) == (0, "TRITON_ATTN", 5)
    assert (found["kv"]["dtype"], found["target"]["chosen"]) == ("fp8_e4m3", "CUTLASS_MLA")
    assert found["graphs"]["decode"] == "FULL"
    assert found["target"]["graphs"]["mode"] == "PIECEWISE"
    same = asked(*spec, *backend, "--role", "draft", "--model", models / "mla")[1]
    assert same == found
    code, found = asked(*spec, *backend, "--model", models / "mla")
    assert (code, found["role"], found["chosen"]) == (0, "target", "CUTLASS_MLA")
    assert found["query_tokens"] == 5
    adaptive = json.dumps(config | {"enable_adaptive_verification": True})
    code, found = asked("--device", "sm90", "--role", "draft", "--speculative-config", adaptive)
    assert code == 2 and "needs a confidence head" in found["error"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "{models}/none"], "no config.json in '{models}/none'"),
        (["--model", "default"], "not a .gguf file, not `default`"),
        ([], "--model is missing; accepted: a checkpoint's directory"),
        ([], "or no model, with --matrix"),
        (["--device", "sm99", "--model", "{models}/qwen3"], "unknown device 'sm99'; accepted: cpu"),
        (["--role", "both", "--model", "{models}/qwen3"], "--role is 'both'; accepted: target"),
        (["--dcp", "0", "--model", "{models}/qwen3"], "--dcp is 0; accepted: 1 or more"),
        (["--colocated", "--model", "{models}/qwen3"], "go with --role draft"),
        (
            ["--role", "draft", "--colocated", "--model", "{models}/plain"],
            "--colocated needs --target",
        ),
        (["--speculative-config", "{{", "--model", "{models}/qwen3"], "is no JSON"),
        (["--matrix", "--model", "{models}/qwen3"], "--matrix goes with --device, --dcp"),
        (["--target-dcp", "2", "--model", "{models}/qwen3"], "need --role draft and --target"),
        (
            [
                "--role",
                "draft",
                "--model",
                "{models}/qwen3",
                "--speculative-config",
                '{{"method": "dflash"}}',
            ],
            "method is 'dflash', the checkpoint is an ordinary model",
        ),
        (
            ["--speculative-config", '{{"num_speculative_tokens": "x"}}'],
            "num_speculative_tokens is 'x'; accepted: a number",
        ),
        (
            [
                "--role",
                "draft",
                "--model",
                "{models}/plain",
                "--attention-backend",
                "FLASH_ATTN",
                "--speculative-config",
                '{{"attention_backend": "TRITON_ATTN"}}',
            ],
            "attention_backend is 'TRITON_ATTN' in speculative-config and 'FLASH_ATTN' as a flag",
        ),
    ],
)
def test_wrong_calls_say_what_is_accepted(models: Path, arguments: list[str], text: str) -> None:
    filled = [one.format(models=models) for one in arguments]
    code, out, err = call("--device", "sm90", *filled, "--json")
    found = json.loads(out)
    assert code == 2 and found["resolved"] is False
    text = text.format(models=models)
    assert text in found["error"] and text in err


@pytest.mark.parametrize("change", [{"layer_types": [S]}, {"head_dim": "x"}, {"block_size": -1}])
def test_bad_configs_are_named(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DFLASH | change))
    code, found = asked("--device", "sm90", "--role", "draft", "--model", tmp_path)
    assert code == 2 and f"config {next(iter(change))} = " in found["error"]
    (tmp_path / "config.json").write_text("[]")
    code, found = asked("--device", "sm90", "--role", "draft", "--model", tmp_path)
    assert code == 2 and "is no JSON object" in found["error"]


def nonsense(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The config with each of its values, nested ones too, replaced by what cannot be."""
    for key, value in config.items():
        for odd in (None, True, 0, -1, 1.5, "x", [], ["x"], [3], {}, 10**12, 10**400, 2**31 - 1):
            yield config | {key: odd}
        if isinstance(value, dict):
            yield from ({**config, key: inner} for inner in nonsense(value))


@pytest.mark.parametrize(
    "config",
    [LLAMA, QWEN3, DEEPSEEK, SPARSE, V4 | {"n_mtp_layers": 2}, *(c for c, _ in STYLES.values())],
)
@pytest.mark.parametrize("draft", [False, True])
def test_nonsense_in_a_config_is_a_refusal(config: dict[str, Any], draft: bool) -> None:
    """A description, or a CheckpointError: no other error, and no modes for 2^31 layers."""
    refused = 0
    for odd in nonsense(config):
        try:
            assert len(parse_checkpoint(odd, draft=draft).shape.modes) <= 4096
        except CheckpointError as error:
            assert str(error).startswith("config ")
            refused += 1
    assert refused > 3 * len(config)


def test_several_targets(models: Path) -> None:
    arguments = ["--device", "sm100", "--role", "draft", "--model", models / "plain"]
    for name in ("mla", "qwen3", "v4"):
        arguments += ["--target", models / name]
    code, found = asked(*arguments)
    assert (code, found["resolved"]) == (0, True)
    targets = [pairing["target"]["model_type"] for pairing in found["pairings"]]
    assert targets == ["deepseek_v3", "qwen3", "deepseek_v4"]
    # A target that cannot start makes the pairing impossible.
    code, found = asked(*arguments, "--target-attention-backend", "FLASH_ATTN")
    assert code == 2
    assert [pairing["target"]["resolved"] for pairing in found["pairings"]] == [False, True, False]


def test_matrix() -> None:
    code, found = asked("--device", "sm100", "--matrix", "--dcp", "8")
    assert code == 0 and len(found["pairings"]) == 24
    by_name = {(one["target"], one["draft"]): one for one in found["pairings"]}
    cell = by_name["MLA", "DFlash, non-causal"]
    assert cell["target_outcome"]["chosen"] == "FLASHINFER_MLA"
    assert cell["separate"]["chosen"] == cell["colocated"]["chosen"] == "FLASH_ATTN"
    reasons = {one["name"]: one["reasons"] for one in cell["colocated"]["candidates"]}
    assert reasons["FLASHINFER"] and not reasons["TRITON_ATTN"]
    code, out, _ = call("--device", "cpu", "--matrix")
    assert code == 0 and "CPU_ATTN (NONE)" in out and "refused" in out


def test_tables_for_readers(models: Path) -> None:
    code, out, _ = call(
        "--device", "sm100", "--role", "draft", "--model", models / "mixed",
        "--target", models / "mla", "--dcp", "8", "--attention-backend", "FLASHINFER",
    )  # fmt: skip
    assert code == 2
    assert "dflash draft (qwen3) on sm100" in out and "target (deepseek_v3) on sm100" in out
    assert "refused: Attention backend FLASHINFER cannot run the dflash draft on sm100" in out
    assert "non-causal with decode context parallelism not supported [layer 2: non-causal]" in out
    code, out, _ = call("--device", "sm100", "--role", "draft", "--model", models / "mixed")
    assert code == 0 and "attention: FLASH_ATTN (auto)" in out
    assert "layers 0, 1: causal, window=16: FLASH_ATTN" in out


_BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton", "numpy", "grpc", "specwire"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
import typer
from engine.attention.resolve import resolve
from engine.commands import register
app = typer.Typer()
app.callback()(lambda: None)
register(app)
app(["backends", "--device", "sm100", "--matrix", "--json"])
"""


def test_neither_resolver_nor_command_imports_torch() -> None:
    result = subprocess.run(
        [sys.executable, "-c", _BLOCKED], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)["pairings"]) == 24


def test_the_entry_point_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["specwire.commands"]["backends"].partition(":")
    assert getattr(importlib.import_module(module), name) is register


def test_the_documentation_shows_the_table_as_it_is() -> None:
    text = (ROOT / "docs" / "backends.md").read_text()
    assert markdown() in text
    for quirk in QUIRKS:
        row = next(line for line in text.splitlines() if quirk.reference in line.replace("`", ""))
        assert quirk.backend in row and ("refused" in row) == quirk.denies


def test_the_list_of_limits() -> None:
    code, found = asked("--list")
    assert code == 0 and len(found["backends"]) == 32
    assert {row["here"] for row in found["backends"]} == {
        "judged only",
        "implemented, ran on a GPU",
        "implemented, never ran on a GPU",
    }
    code, out, _ = call("--list")
    assert code == 0 and "TOKENSPEED_MLA\n  layers: mla\n  device: 10.x\n" in out


def test_beside_the_other_commands(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As installed: through the entry points of the project, with its own exit status."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    group = "specwire.commands"
    points = [
        metadata.EntryPoint(name, value, group)
        for name, value in project["entry-points"][group].items()
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: points)
    for arguments, code, words in (
        (["--help"], 0, "\n  backends "),
        (["backends", "--help"], 0, "specwire backends --device sm100 --matrix"),
        (["backends", "--device", "sm90", "--model", str(models / "qwen3")], 0, "FLASH_ATTN"),
        (["backends", "--device", "sm90", "--model", str(models / "v4"), "--dcp", "2"], 2, "refus"),
    ):
        monkeypatch.setattr(sys, "argv", ["specwire", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert (caught.value.code or 0) == code and words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 2048}, "config hidden_size = 2048 is not supported; accepted: 4096, the"),
        ({"num_target_layers": 36}, "config num_target_layers = 36 is not supported; accepted: 4"),
        ({"vocab_size": 9}, "config vocab_size = 9 is not supported; accepted: 300, the target's"),
        ({"dflash_config": {"target_layer_ids": [1, 4]}}, "ids below 4: the target has 4 layers"),
        (
            {"dflash_config": None, "aux_hidden_state_layer_ids": [1, 5], "hidden_size": 64},
            "ids below 5: the target has 4 layers",
        ),
    ],
)
def test_a_draft_for_another_target_is_refused(
    models: Path, change: dict[str, Any], said: str
) -> None:
    (models / "plain" / "config.json").write_text(json.dumps(DFLASH | change))
    (models / "qwen3" / "config.json").write_text(json.dumps(QWEN3 | {"vocab_size": 300}))
    arguments = ["--device", "sm90", "--role", "draft", "--model", models / "plain"]
    code, found = asked(*arguments, "--target", models / "qwen3")
    assert code == 2 and said in found["error"]


@pytest.mark.parametrize("style", STYLES)
def test_a_draft_that_says_nothing_else_is_for_the_target(models: Path, style: str) -> None:
    arguments = ["--device", "sm90", "--role", "draft", "--model", models / style]
    assert asked(*arguments, "--target", models / "qwen3")[0] == 0
