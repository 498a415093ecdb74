"""Random targets and drafts of a few widths, as checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

BLOCK, _DRAFT_LAYERS = 8, 2
# The target's layers change its text, the draft's its proposals, and some tokens agree.
_LOUD, _QUIET = 200.0, 0.2
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


def write_target(
    folder: Path, family: str, options: dict[str, Any], loudness: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Embedding, times `loudness`, and head, fp32 [vocabulary, hidden]."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options))
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedding.data *= loudness
    tables = embedding.detach().clone(), head.detach().clone()
    model.to(torch.bfloat16).save_pretrained(folder)
    words = {f"w{i}": i for i in range(options["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return tables


def write_draft(
    folder: Path, target: dict[str, Any], heads: tuple[int, int, int], taps: Sequence[int]
) -> None:
    """`heads`: query heads, KV heads, head size."""
    hidden = target["hidden_size"]
    query, kv = heads[0] * heads[2], heads[1] * heads[2]
    shapes = {
        "q_proj": (query, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden),
        "o_proj": (hidden, query),
    }  # fmt: skip
    state = _body(target, shapes, {"q_norm": heads[2], "k_norm": heads[2]}, len(taps))
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "head_dim": heads[2],
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1],
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": list(taps)},
    }  # fmt: skip
    _save(folder, state, _sizes(target) | config)


def write_latent_dspark(
    folder: Path,
    target: dict[str, Any],
    tables: tuple[Tensor, Tensor],
    taps: Sequence[int],
    rank: int | None = None,
) -> None:
    """With the target's latent attention. Its Markov head has what the target's embedding and head
    (`tables`) make of the token before, and its body is quiet: a target with a loud embedding
    accepts some. `rank`: of the Markov head, the hidden size unless given.
    """
    hidden, heads, latent = (
        target[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    nope, rope, value = (target[f"{key}_head_dim"] for key in ("qk_nope", "qk_rope", "v"))
    low = target["q_lora_rank"]
    shapes = {
        "q_a_proj": (low, hidden), "q_b_proj": (heads * (nope + rope), low),
        "kv_a_proj_with_mqa": (latent + rope, hidden),
        "kv_b_proj": (heads * (nope + value), latent), "o_proj": (hidden, heads * value),
    }  # fmt: skip
    norms = {"q_a_layernorm": low, "kv_a_layernorm": latent}
    state = _body(target, shapes, norms, len(taps))
    state["norm.weight"] *= _QUIET
    embedding, head = tables
    rank = rank or hidden
    known = embedding / embedding.square().mean(-1, True).sqrt()
    state["markov_head.markov_w1.weight"] = known[:, :rank].contiguous()
    state["markov_head.markov_w2.weight"] = head[:, :rank].contiguous()
    kept = (
        "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim",
    )  # fmt: skip
    config = {key: target[key] for key in kept} | {
        "architectures": ["Qwen3DSparkModel"], "model_type": "deepseek_v3",
        "rope_interleave": True, "mask_token_id": 3, "target_layer_ids": list(taps),
        "markov_rank": rank, "markov_head_type": "vanilla", "enable_confidence_head": False,
        "sample_from_anchor": True, "tie_word_embeddings": False,
    }  # fmt: skip
    _save(folder, state, _sizes(target) | config)


def _body(
    target: dict[str, Any],
    attention: dict[str, tuple[int, int]],
    norms: dict[str, int],
    taps: int,
) -> dict[str, Tensor]:
    """Everything but the head. `attention`: shapes of a layer's products; `norms`: widths."""
    torch.manual_seed(4)
    hidden, inner = target["hidden_size"], target["intermediate_size"]
    shapes = {f"self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    shapes["mlp.down_proj"] = (hidden, inner)
    widths = {f"self_attn.{name}": width for name, width in norms.items()}
    widths |= {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    state = {"fc.weight": torch.randn(hidden, taps * hidden) / (taps * hidden) ** 0.5}
    state |= {f"{name}.weight": torch.ones(hidden) for name in ("hidden_norm", "norm")}
    for layer in range(_DRAFT_LAYERS):
        for name, shape in shapes.items():
            state[f"layers.{layer}.{name}.weight"] = torch.randn(shape) / shape[1] ** 0.5
        for name, width in widths.items():
            state[f"layers.{layer}.{name}.weight"] = torch.ones(width)
    return state


def _sizes(target: dict[str, Any]) -> dict[str, Any]:
    same = ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings")
    own = {"block_size": BLOCK, "num_hidden_layers": _DRAFT_LAYERS, "rms_norm_eps": 1e-5}
    own |= {"rope_theta": 10000.0, "num_target_layers": target["num_hidden_layers"]}
    return own | {key: target[key] for key in same}


def _save(folder: Path, state: dict[str, Tensor], config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.bfloat16() for k, v in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def write_dense_pair(folder: Path) -> int:
    """`target` and `draft` in the folder; the vocabulary's size."""
    write_target(folder / "target", "llama", DENSE)
    write_draft(folder / "draft", DENSE, (4, 2, 32), (0, 1))
    return int(DENSE["vocab_size"])


def write_latent_pair(folder: Path) -> int:
    """The same with a DeepSeek target, and `dspark`, a latent draft for it."""
    tables = write_target(folder / "target", "deepseek_v3", LATENT, _LOUD)
    write_draft(folder / "draft", LATENT, (4, 2, 64), (0, 1))
    write_latent_dspark(folder / "dspark", LATENT, tables, (0, 1))
    return int(LATENT["vocab_size"])
