"""Random targets and DFlash drafts of a few widths, as checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM

BLOCK = 8
# Wide enough for every backend's head sizes and pages, small enough for a CPU.
LATENT: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 128,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 96,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "initializer_range": 0.1,
    "max_position_embeddings": 1024, "rope_theta": 10000.0,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


DENSE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1,
    "max_position_embeddings": 1024, "rope_theta": 10000.0,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def write_target(folder: Path, family: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options))
    model.to(torch.bfloat16).save_pretrained(folder)
    words = {f"w{i}": i for i in range(options["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def write_draft(
    folder: Path, target: dict[str, Any], heads: tuple[int, int, int], taps: Sequence[int]
) -> None:
    """`heads`: query heads, KV heads, head size."""
    torch.manual_seed(4)
    hidden, inner, layers = target["hidden_size"], target["intermediate_size"], 2
    query, kv = heads[0] * heads[2], heads[1] * heads[2]
    shapes = {
        "self_attn.q_proj": (query, hidden), "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    norms |= {"self_attn.q_norm": heads[2], "self_attn.k_norm": heads[2]}
    width = len(taps) * hidden
    state = {"fc.weight": torch.randn(hidden, width) / width**0.5}
    state |= {f"{name}.weight": torch.ones(hidden) for name in ("hidden_norm", "norm")}
    for layer in range(layers):
        for name, shape in shapes.items():
            state[f"layers.{layer}.{name}.weight"] = torch.randn(shape) / shape[1] ** 0.5
        for name, size in norms.items():
            state[f"layers.{layer}.{name}.weight"] = torch.ones(size)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.bfloat16() for k, v in state.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": BLOCK,
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": heads[2],
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 1024,
        "vocab_size": target["vocab_size"], "num_target_layers": target["num_hidden_layers"],
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": list(taps)},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def write_dense_pair(folder: Path) -> int:
    """`target` and `draft` in the folder; the vocabulary's size."""
    write_target(folder / "target", "llama", DENSE)
    write_draft(folder / "draft", DENSE, (4, 2, 32), (0, 1))
    return int(DENSE["vocab_size"])


def write_latent_pair(folder: Path) -> int:
    """The same with a DeepSeek target."""
    write_target(folder / "target", "deepseek_v3", LATENT)
    write_draft(folder / "draft", LATENT, (4, 2, 64), (0, 1))
    return int(LATENT["vocab_size"])
