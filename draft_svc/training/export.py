"""Checkpoints that the draft service loads: z-lab layout (DFlash), DeepSpec layout (DSpark)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from draft_svc.training.draft import DraftNet
from draft_svc.training.evaluate import SetReport, table
from draft_svc.training.spec import DraftSpec, complete_spec
from engine.errors import CheckpointError
from engine.models.config import ModelConfig
from engine.weights import read_json

MAX_BYTES = 32 * 1024 * 1024


def config_of(spec: DraftSpec, c: ModelConfig) -> dict[str, Any]:
    """config.json of a draft."""
    kind = "sliding_attention" if spec.window else "full_attention"
    shared: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": spec.block,
        "hidden_size": c.hidden_size,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_theta": c.rope.theta,
        "rope_scaling": None,
        "max_position_embeddings": c.max_positions,
        "vocab_size": c.vocab_size,
        "num_target_layers": c.layer_count,
        "tie_word_embeddings": False,
        "layer_types": [kind] * spec.layers,
        "is_causal": spec.causal,
        "torch_dtype": "bfloat16",
    }
    if spec.window:
        shared["sliding_window"] = spec.window
    if spec.method == "dflash":
        shared["dflash_config"] = {
            "mask_token_id": spec.mask,
            "target_layer_ids": list(spec.taps),
            "causal": spec.causal,
        }
        return shared
    return shared | {
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": list(spec.taps),
        "mask_token_id": spec.mask,
        "markov_rank": spec.rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": spec.confidence,
        "confidence_head_with_markov": spec.confidence,
        "sample_from_anchor": spec.slots == "next_token",
    }


def spec_of(config: Mapping[str, Any], name: str, c: ModelConfig) -> DraftSpec:
    """The reverse of `config_of`, for going on from a checkpoint. Raises CheckpointError."""
    nested = config.get("dflash_config")
    where = config if nested is None else nested
    try:
        windows = {t == "sliding_attention" for t in config["layer_types"]}
        if len(windows) != 1:
            raise CheckpointError("mixed layer types cannot be trained")
        dspark = nested is None
        spec = DraftSpec(
            name=name,
            method="dspark" if dspark else "dflash",
            layers=config["num_hidden_layers"],
            block=config["block_size"],
            taps=tuple(where["target_layer_ids"]),
            mask=where["mask_token_id"],
            intermediate=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            slots="next_token" if dspark and config["sample_from_anchor"] else "fill_in",
            causal=bool(config["is_causal"]),
            window=config["sliding_window"] if windows.pop() else 0,
            rank=config["markov_rank"] if dspark else 0,
            confidence=bool(dspark and config["enable_confidence_head"]),
        )
    except KeyError as error:
        raise CheckpointError(f"draft config has no {error.args[0]}") from None
    return complete_spec(spec, c)


def export(
    draft: DraftNet,
    directory: Path,
    facts: Mapping[str, Any],
    reports: Sequence[SetReport] = (),
) -> int:
    """Writes config, weights, model card and the facts of the card; returns the weights' bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    config = config_of(draft.spec, draft.net.config)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    path = directory / "model.safetensors"
    save_file(draft.export_state(), path, metadata={"format": "pt"})
    size = path.stat().st_size
    (directory / "training.json").write_text(json.dumps(dict(facts), indent=1) + "\n")
    (directory / "README.md").write_text(model_card(draft.spec, facts, reports, size))
    return size


def load_export(directory: Path, draft: DraftNet) -> None:
    """Puts an exported checkpoint's weights into a draft of the same shape."""
    draft.load_state(load_file(directory / "model.safetensors"))


def read_spec(directory: Path, name: str, c: ModelConfig) -> DraftSpec:
    return spec_of(read_json(directory / "config.json"), name, c)


def model_card(
    spec: DraftSpec, facts: Mapping[str, Any], reports: Sequence[SetReport], size: int
) -> str:
    """What a user must know: how it was made, from what, and what it measured."""
    kind = "DSpark" if spec.method == "dspark" else "DFlash"
    layout = "DeepSpec" if spec.method == "dspark" else "z-lab"
    attention = "causal" if spec.causal else "non-causal"
    rows = [
        ("layout", f"{layout}: `config.json`, `model.safetensors`; no embedding, no head"),
        ("size", f"{spec.layers} layers, intermediate {spec.intermediate}, {size / 1e6:.1f} MB"),
        ("taps", ", ".join(map(str, spec.taps)) + " (0-based layer outputs, before any norm)"),
        (
            "block",
            f"{spec.block} slots, {spec.slots}, {spec.proposals} proposals, mask {spec.mask}",
        ),
        ("attention", attention + (f", window {spec.window}" if spec.window else "")),
    ]
    if spec.rank:
        head = "with" if spec.confidence else "without"
        rows.append(("Markov head", f"vanilla, rank {spec.rank}, {head} confidence head"))
    rows += [
        (key.replace("_", " "), str(value)) for key, value in facts.items() if key != "command"
    ]
    lines = [f"# {spec.name}", "", f"A {kind} draft. The text is always the target's own:"]
    lines += ["a draft changes speed only.", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in rows]
    if facts.get("command"):
        lines += ["", "Made by:", "", "```", str(facts["command"]), "```"]
    if reports:
        lines += ["", "Mean tokens per target step (tau) of the real loop, the n-gram baseline"]
        lines += ["beside it, looping outputs left out:", "", table(reports)]
    return "\n".join(lines) + "\n"
