"""Tiny random checkpoints, made with transformers so that the reference is not ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.api import Item
from engine.batch import pack
from engine.config import EngineConfig
from engine.kernels.cpu import ops
from engine.kv.pool import PageTable
from engine.loading import load_engine
from engine.runner import NativeEngine

VOCAB, HIDDEN, LAYERS = 96, 64, 4
KERNELS = ["native", "torch"] if ops.available() else ["torch"]
# Latent attention with ranks and widths that are no powers of two; every head has its keys.
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "moe_intermediate_size": 36,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
}


def write_model(directory: Path, family: str, **overrides: Any) -> PreTrainedModel:
    """Saves a random model of a model type; returns it in fp32, ready to compare with."""
    torch.manual_seed(0)
    options = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 112,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_theta": 5000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    config = AutoConfig.for_model(family, **(options | overrides))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide a forgotten norm weight, and zeros a bias
            parameter.data.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            parameter.data.normal_(std=0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.normal_(std=0.5)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": []}))
    return model


def write_llama(directory: Path, **overrides: Any) -> PreTrainedModel:
    return write_model(directory, "llama", **overrides)


def rewrite_config(directory: Path, change: Mapping[str, Any]) -> None:
    """Changes config.json; None removes a key."""
    path = directory / "config.json"
    merged = json.loads(path.read_text()) | change
    path.write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))


def load_tiny(directory: Path, kernels: str = "torch", **overrides: Any) -> NativeEngine:
    options = {"dtype": "float32", "kv_pages": 64, "kernels": kernels} | overrides
    return load_engine(EngineConfig(model=str(directory), **options))


def random_ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()


def run(
    engine: NativeEngine, parts: list[tuple[PageTable, list[int], int]], taps: tuple[int, ...] = ()
) -> tuple[list[Tensor], Tensor | None]:
    """fp32 logits of every row of every part, and the taps of all rows, from one forward."""
    items = [Item(table, ids, start, len(ids)) for table, ids, start in parts]
    with torch.inference_mode():
        logits, tap_rows = engine.forward(pack(items, 16, 0, 0), taps, torch.float32)
    assert logits is not None
    return list(logits.split([len(ids) for _, ids, _ in parts])), tap_rows


@torch.inference_mode()
def reference(model: PreTrainedModel, ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits
