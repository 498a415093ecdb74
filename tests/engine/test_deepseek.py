"""DeepSeek configs and checkpoints: what is read, what is refused, and whole generations against
transformers. Logits and taps of every variant stand in test_families.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.api import Item, Sampling
from engine.errors import BackendUnavailable, CheckpointError, SettingRefused
from engine.models.config import from_hf
from engine.runner import NativeEngine
from tests.engine.test_families import YARN, close
from tests.engine.tiny import LATENT, load_tiny, random_ids, reference, run, write_model

V2: dict[str, Any] = LATENT | {
    "model_type": "deepseek_v2",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "first_k_dense_replace": 1,
}
V3 = V2 | {"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2}
GROUPED = V2 | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
EXPERTS = LATENT | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        (V2, {"kv_lora_rank": 0}, "kv_lora_rank"),
        (V2, {"q_lora_rank": -1}, "q_lora_rank"),
        (V2, {"qk_rope_head_dim": 7}, "head_dim = 7 .* even"),
        (V2, {"head_dim": 12}, "head_dim = 12 .* 8, as qk_nope"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' .* greedy, group_limited"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob"),
        (V2, {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' .* softmax"),
        (V2, {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 .* 1 to 8"),
        (V2, {"num_experts_per_tok": None}, "num_experts_per_tok"),
        (V2, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (V2, {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        (V2, {"rope_interleave": 1}, "rope_interleave"),
        (GROUPED, {"n_group": 3}, "n_group = 3 .* divisor of 8"),
        (GROUPED, {"topk_group": 5}, "topk_group = 5 .* 1 to 4"),
        (GROUPED, {"num_experts_per_tok": 5}, "num_experts_per_tok = 5 .* 1 to 4"),
        (V3, {"topk_method": "greedy"}, "topk_method = 'greedy' .* noaux_tc"),
        (V3, {"n_group": 8}, "n_group = 8 .* leaves 2"),
        (V3, {"quantization_config": {"quant_method": "fp8"}}, "quant_method = 'fp8'"),
        (V3, {"model_type": "deepseek_v32"}, "model_type = 'deepseek_v32'"),
        (V3, {"architectures": ["DeepseekV2ForCausalLM"]}, "DeepseekV3ForCausalLM"),
        (V3, {"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers"),
        (V3, {"rope_scaling": YARN | {"mscale_all_dim": "1"}}, "mscale_all_dim"),
    ],
)
def test_config_refuses_by_name(config: dict[str, Any], change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        from_hf(config | change)


def test_what_transformers_assumes_fills_a_silent_config() -> None:
    bare = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    kept = {key: V3[key] for key in (*bare, "num_attention_heads", "model_type")}
    config = from_hf(kept | {"num_hidden_layers": 5})
    latent, experts = config.latent, config.experts
    assert latent is not None and experts is not None
    assert (latent.rank, latent.q_rank, latent.nope, latent.rope) == (512, 1536, 128, 64)
    assert (latent.value, latent.interleaved, latent.softmax_factor) == (128, True, 1.0)
    assert (config.kv_heads, config.head_dim, config.max_positions) == (1, 576, 4096)
    assert (experts.first_layer, experts.count, experts.chosen, experts.inner) == (3, 256, 8, 2048)
    assert (experts.groups, experts.kept_groups, experts.factor) == (8, 4, 2.5)
    assert (experts.scoring, experts.normed) == ("sigmoid", True)
    assert from_hf(kept | {"num_hidden_layers": 3}).experts is None
    dense = from_hf(V2 | {"first_k_dense_replace": 0, "n_routed_experts": None})
    assert dense.experts is None and dense.latent is not None


def greedy(engine: NativeEngine, prompt: list[int], count: int, guesses: list[int]) -> list[int]:
    """Tokens by verify blocks of 3 guesses that are right now and then."""
    table = engine.allocate(len(prompt) + count + 4)
    options = {"sampling": Sampling(temperature=0.0)}
    first = engine.step([Item(table, prompt, 0, 1, **options)])[0]  # type: ignore[arg-type]
    tokens = list(first.tokens)
    while len(tokens) < count:
        draft = [*guesses[len(tokens) : len(tokens) + 2], 5]
        ids, start = [tokens[-1], *draft], len(prompt) + len(tokens) - 1
        item = Item(table, ids, start, len(ids), **options)  # type: ignore[arg-type]
        tokens += engine.step([item])[0].tokens
    table.free()
    return tokens[:count]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("deepseek_v2", LATENT | {"first_k_dense_replace": 4, "q_lora_rank": 28}),
        ("deepseek_v3", EXPERTS | {"rope_parameters": YARN}),
    ],
)
def test_greedy_text_is_that_of_transformers(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    model, prompt, count = write_model(tmp_path, family, **options), random_ids(11), 24
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(reference(model, ids)[-1].argmax()))
    engine = load_tiny(tmp_path)
    assert engine.attention.chosen == "TORCH_MLA" and not engine.rows_independent
    assert greedy(engine, prompt, count, ids[len(prompt) :]) == ids[len(prompt) :]
    engine.check_integrity()


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_long_chunks_send_rows_to_their_experts_only(tmp_path: Path, kernels: str) -> None:
    """Longer than what the experts take whole; the same logits either way."""
    model = write_model(tmp_path, "deepseek_v3", **EXPERTS)
    engine, ids = load_tiny(tmp_path, kernels), random_ids(150)
    table = engine.allocate(160)
    (logits,), _ = run(engine, [(table, ids, 0)])
    close(logits, reference(model, ids))


def test_layers_that_predict_further_tokens_are_left_alone(tmp_path: Path) -> None:
    model = write_model(tmp_path, "deepseek_v3", num_nextn_predict_layers=1, **EXPERTS)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | {"model.layers.4.eh_proj.weight": torch.zeros(64, 128)}
    save_file(tensors, path)
    engine = load_tiny(tmp_path)
    (logits,), _ = run(engine, [(engine.allocate(20), random_ids(9), 0)])
    close(logits, reference(model, random_ids(9)))
    config = tmp_path / "config.json"
    without = json.loads(config.read_text()) | {"num_nextn_predict_layers": 0}
    config.write_text(json.dumps(without))
    with pytest.raises(CheckpointError, match=r"model\.layers\.4\.eh_proj\.weight"):
        load_tiny(tmp_path)


def test_the_bias_of_the_choice_keeps_its_precision(tmp_path: Path) -> None:
    """bf16 weights, but the router in fp32: half a bit would send a row elsewhere."""
    write_model(tmp_path, "deepseek_v3", **EXPERTS)
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors = load_file(path)
    tensors[name] = 4 + torch.arange(8) * 1e-4
    save_file(tensors, path)
    engine = load_tiny(tmp_path, dtype="bfloat16")
    held: Any = engine._model
    assert torch.equal(held.layers[1].mlp._bias, tensors[name])


def test_fp8_kv_is_close_to_plain_and_smaller(tmp_path: Path) -> None:
    model = write_model(tmp_path, "deepseek_v2", **LATENT | {"first_k_dense_replace": 4})
    ids = random_ids(40)
    for kv, bytes_per_token in (("bfloat16", 4 * 64), ("fp8", 4 * (24 + 4 + 16))):
        engine = load_tiny(tmp_path, kv_dtype=kv)
        assert engine.attention.kv_bytes_per_token == bytes_per_token
        table = engine.allocate(48)
        logits = torch.cat(
            [run(engine, [(table, ids[at : at + 10], at)])[0][0] for at in range(0, 40, 10)]
        )
        error = (logits - reference(model, ids)).norm() / reference(model, ids).norm()
        assert error < (0.02 if kv == "bfloat16" else 0.1), float(error)
    with pytest.raises(BackendUnavailable, match="kv_cache_dtype not supported"):
        load_tiny(tmp_path, kv_dtype="fp8_e5m2")


def test_pages_of_latent_kv_count_its_own_bytes(tmp_path: Path) -> None:
    write_model(tmp_path, "deepseek_v2", **LATENT | {"first_k_dense_replace": 4})
    engine = load_tiny(tmp_path, kv_pages=None, kv_memory_mb=1)
    assert engine.stats().total == 2**20 // (16 * 4 * 32 * 4)
    with pytest.raises(SettingRefused, match="max_length"):
        load_tiny(tmp_path, max_length=4096)
