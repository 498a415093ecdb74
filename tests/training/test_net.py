"""The dense forward of every family that the engine runs, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draft_svc.training.net import StaticCache, load_target
from tests.engine.tiny import LATENT, write_model

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 8}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}),
}


# DeepSeek's: with and without a latent space for queries, softmax and sigmoid routers, biases,
# values wider than queries, YaRN's sharper softmax.
LATENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek v2": ("deepseek_v2", {"first_k_dense_replace": 1}),
    "deepseek v2, wide values": (
        "deepseek_v2",
        {"first_k_dense_replace": 4, "v_head_dim": 25, "q_lora_rank": 18, "attention_bias": True},
    ),
    "deepseek v3": (
        "deepseek_v3",
        {
            "first_k_dense_replace": 1,
            "q_lora_rank": 18,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
}


def write(directory: Path, family: str) -> PreTrainedModel:
    if family in LATENTS:
        name, more = LATENTS[family]
        return write_model(directory, name, **(LATENT | more))
    config, model_class, more = FAMILIES[family]
    torch.manual_seed(1)
    options = {
        "vocab_size": 90,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "attn_implementation": "eager",
    }
    model = model_class(config(**(options | more))).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("family", sorted([*FAMILIES, *LATENTS]))
def test_logits_and_taps_equal_transformers(tmp_path: Path, family: str) -> None:
    """Whole documents, and the same tokens in two pieces over a cache; right padding changes
    nothing (DF-4)."""
    model = write(tmp_path, family)
    net = load_target(tmp_path, torch.device("cpu"), torch.float32)
    ids = torch.randint(3, 90, (2, 30), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        wanted = model(ids, output_hidden_states=True)
        padded = torch.cat((ids, torch.zeros(2, 5, dtype=torch.int64)), 1)
        states, taps = net.forward(padded.flatten(), net.causal(2, 35), (0, 1))
        got = net.logits(states).view(2, 35, -1)[:, :30]
        torch.testing.assert_close(got, wanted.logits, rtol=1e-3, atol=1e-3)
        assert taps is not None
        for i in (0, 1):
            rows = taps.view(2, 35, 2, -1)[:, :30, i]
            torch.testing.assert_close(rows, wanted.hidden_states[i + 1], rtol=1e-3, atol=1e-3)
        cache = StaticCache(net, 2, 48)
        net.forward(ids[:, :23].flatten(), net.causal(2, 23, cache, torch.arange(2)))
        positions = torch.arange(23, 30).expand(2, -1)
        states, _ = net.forward(ids[:, 23:].flatten(), net.cached(cache, positions, 30))
        got = net.logits(states).view(2, 7, -1)
        torch.testing.assert_close(got, wanted.logits[:, 23:], rtol=1e-3, atol=1e-3)
