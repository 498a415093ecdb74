"""Every model family against transformers, fp32, 1e-4, and what a config may not ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from engine.attention.base import LayerMode
from engine.errors import CheckpointError
from engine.models.config import FAMILIES, from_hf
from engine.runner import NativeEngine
from tests.engine.tiny import (
    HIDDEN,
    KERNELS,
    LATENT,
    LAYERS,
    load_tiny,
    random_ids,
    reference,
    run,
    write_model,
)

Pair = tuple[PreTrainedModel, NativeEngine]
# Windows are shorter than the texts below, and prompts and blocks cross them.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied-8-to-1": (
        "llama",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "tie_word_embeddings": True,
        },
    ),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    "qwen3-tied": ("qwen3", {"head_dim": 48, "tie_word_embeddings": True}),
    "qwen3-biases-window": (
        "qwen3",
        {
            "head_dim": 16,
            "num_key_value_heads": 4,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
}


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
CASES |= {
    "deepseek_v2-dense": ("deepseek_v2", LATENT | {"first_k_dense_replace": 4, "mlp_bias": True}),
    "deepseek_v2-q-rank": (
        "deepseek_v2",
        LATENT | {"q_lora_rank": 28, "attention_bias": True, "first_k_dense_replace": 4},
    ),
    "deepseek_v2-experts": (
        "deepseek_v2",
        LATENT | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.7},
    ),
    "deepseek_v2-groups-yarn": (
        "deepseek_v2",
        LATENT
        | {"first_k_dense_replace": 2, "topk_method": "group_limited_greedy", "n_group": 4}
        | {"topk_group": 2, "attention_bias": True, "rope_parameters": YARN},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        LATENT
        | {"q_lora_rank": 28, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
        | {"attention_bias": True, "rope_parameters": YARN},
    ),
    "deepseek_v3-half-split": (
        "deepseek_v3",
        LATENT
        | {"rope_interleave": False, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}
        | {"first_k_dense_replace": 0, "n_shared_experts": 2},
    ),
}


@pytest.fixture(
    scope="module",
    params=[(case, kernels) for case in CASES for kernels in KERNELS],
    ids=lambda param: "-".join(param),
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    case, kernels = request.param
    family, overrides = CASES[case]
    directory = tmp_path_factory.mktemp(case)
    return write_model(directory, family, **overrides), load_tiny(directory, kernels)


def close(own: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)


def test_prefill(pair: Pair) -> None:
    model, engine = pair
    ids = random_ids(37)
    table = engine.allocate(64)
    (logits,), _ = run(engine, [(table, ids, 0)])
    close(logits, reference(model, ids))
    table.free()


@pytest.mark.parametrize("chunk", [1, 7, 30])
def test_chunked_prefill(pair: Pair, chunk: int) -> None:
    model, engine = pair
    count = 14 if chunk == 1 else 41
    ids = random_ids(count, seed=chunk)
    table = engine.allocate(64)
    parts = [
        run(engine, [(table, ids[at : at + chunk], at)])[0][0] for at in range(0, count, chunk)
    ]
    close(torch.cat(parts), reference(model, ids))
    table.free()


def test_verify_after_truncation_sees_only_the_new_tokens(pair: Pair) -> None:
    model, engine = pair
    ids, wrong, right = random_ids(20), random_ids(8, seed=1), random_ids(6, seed=2)
    table = engine.allocate(64)
    run(engine, [(table, ids, 0)])
    run(engine, [(table, wrong, 20)])
    (logits,), _ = run(engine, [(table, right, 22)])  # two of the first block were kept
    close(logits, reference(model, ids + wrong[:2] + right)[22:])
    table.free()


def test_mixed_ragged_batch(pair: Pair) -> None:
    model, engine = pair
    lengths, widths = (3, 33, 17, 0), (1, 8, 5, 29)
    sessions = [random_ids(a + b, seed=a) for a, b in zip(lengths, widths, strict=True)]
    tables = [engine.allocate(64) for _ in sessions]
    starts = list(zip(tables, sessions, lengths, strict=True))
    run(engine, [(table, ids[:at], 0) for table, ids, at in starts if at])
    logits, _ = run(engine, [(table, ids[at:], at) for table, ids, at in starts])
    for own, ids, at in zip(logits, sessions, lengths, strict=True):
        close(own, reference(model, ids)[at:])
    for table in tables:
        table.free()


def test_taps_equal_hooks_on_every_layer_the_last_one_included(pair: Pair) -> None:
    """DF-5, DF-6, DF-7, DF-24, DF-30: outputs of the layers named, before the final norm."""
    model, engine = pair
    ids = random_ids(23)
    outputs: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]
    reference(model, ids)
    for hook in hooks:
        hook.remove()
    table = engine.allocate(32)
    _, taps = run(engine, [(table, ids, 0)], tuple(range(LAYERS)))
    assert taps is not None and taps.shape == (23, LAYERS * HIDDEN)
    for own, other in zip(taps.split(HIDDEN, dim=1), outputs, strict=True):
        close(own, other.reshape(23, HIDDEN))
    table.free()


@st.composite
def head_shapes(draw: st.DrawFn) -> dict[str, int]:
    kv_heads, group = draw(st.integers(1, 5)), draw(st.integers(1, 20))
    return {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * group,
        "head_dim": 2 * draw(st.sampled_from([1, 2, 3, 4, 6, 10, 16, 24, 40, 48, 64])),
        "hidden_size": draw(st.integers(5, 80)),
        "intermediate_size": draw(st.integers(3, 90)),
        "vocab_size": draw(st.integers(20, 130)),
    }


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
@settings(max_examples=8, deadline=None)
@given(shape=head_shapes(), length=st.integers(1, 40))
def test_any_head_shape(
    tmp_path_factory: pytest.TempPathFactory, family: str, shape: dict[str, int], length: int
) -> None:
    """Both kernel paths, for every ratio of heads, every even head_dim and odd widths."""
    directory = tmp_path_factory.mktemp("shape")
    model = write_model(directory, family, num_hidden_layers=2, **shape)
    ids = [i % shape["vocab_size"] for i in random_ids(length, seed=shape["hidden_size"])]
    expected = reference(model, ids)
    for kernels in KERNELS:
        engine = load_tiny(directory, kernels)
        table, cut = engine.allocate(48), length // 2
        parts = [run(engine, [(table, ids[:cut], 0)])[0][0]] if cut else []
        parts += run(engine, [(table, ids[cut:], cut)])[0]
        close(torch.cat(parts), expected)
        fits = shape["head_dim"] % 8 == 0 and kernels == "native"
        assert engine.attention.chosen == ("CPU_ATTN" if fits else "TORCH_SDPA")
        if kernels == "native" and not fits:  # the way round is visible, not silent
            reasons = engine.attention.candidates[0].reasons
            assert reasons == (
                f"head_size not supported ({shape['head_dim']}; "
                "accepted: multiples of 8 up to 1024)",
            )


def test_transformers_defaults_fill_what_a_config_leaves_out() -> None:
    silent = {key: value for key, value in GOOD.items() if key != "max_position_embeddings"}
    config = from_hf(silent | {"model_type": "qwen3"} | {"num_attention_heads": 32})
    assert (config.head_dim, config.kv_heads, config.max_positions) == (128, 32, 32768)
    assert config.modes == (LayerMode(),) * 4 and config.head_norms and not config.qkv_bias
    config = from_hf(silent | {"model_type": "mistral", "num_attention_heads": 16})
    assert (config.head_dim, config.kv_heads) == (4, 8)
    assert config.modes == (LayerMode(window=4096),) * 4
    config = from_hf(silent | {"model_type": "qwen2", "num_key_value_heads": 2})
    assert (config.qkv_bias, config.out_bias, config.head_norms) == (True, False, False)


GOOD: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
}


QWEN = {"model_type": "qwen2", "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma2"}, "model_type = 'gemma2' .* llama, mistral, qwen2, qwen3"),
        ({"model_type": "qwen3_moe"}, "model_type"),
        ({"model_type": "mamba2"}, "model_type = 'mamba2'"),
        ({"model_type": "qwen3_next"}, "model_type = 'qwen3_next'"),
        ({"model_type": None}, "model_type"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM"),
        ({"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}, "Qwen3ForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' .* 'silu'"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"num_local_experts": 8}, "num_local_experts = 8 .* dense"),
        ({"model_type": "qwen3", "num_experts": 128}, "num_experts = 128"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method = 'gptq' .* bf16"),
        ({"compression_config": {}}, "compression_config"),
        ({"model_type": "qwen2", "use_mrope": True, "num_key_value_heads": 2}, "use_mrope"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        (QWEN | {"layer_types": ["full_attention"] * 3}, "layer_types .* 4 of"),
        (QWEN | {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        (QWEN | {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window"),
        (QWEN | {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        (QWEN | {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 0}, "_win"),
        ({"rope_interleaved": True}, "rope_interleaved = True .* False"),
        ({"head_dim": 15}, "head_dim = 15 .* even"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"bos_token_id": "<s>"}, "bos_token_id"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "theta"),
    ],
)
def test_config_refuses_by_name(change: dict[str, Any], named: str) -> None:
    """WC-24 among others: a recurrent cache cannot be truncated, so such models are refused."""
    with pytest.raises(CheckpointError, match=named):
        from_hf(GOOD | change)


@pytest.mark.parametrize("first", [0, 1, 3, 4, 9])
def test_windows_from_a_first_layer_equal_transformers_layer_types(first: int) -> None:
    """Older configs give `max_window_layers`, newer ones the list made of it."""
    old = GOOD | {"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 2}
    old |= {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": first}
    theirs = AutoConfig.for_model(**old).to_dict()
    assert theirs["layer_types"] == ["full_attention"] * min(first, 4) + ["sliding_attention"] * (
        4 - min(first, 4)
    )
    windows = [5 if kind == "sliding_attention" else None for kind in theirs["layer_types"]]
    assert [mode.window for mode in from_hf(old).modes] == windows
    new = old | {"layer_types": theirs["layer_types"]}
    assert from_hf(new).modes == from_hf(old).modes


def test_null_is_absent() -> None:
    nulls = ("attention_bias", "tie_word_embeddings", "rope_scaling", "head_dim", "layer_types")
    assert from_hf(GOOD | dict.fromkeys(nulls)) == from_hf(GOOD)


def test_config_must_be_an_object() -> None:
    with pytest.raises(CheckpointError, match="not a JSON object"):
        from_hf([])  # type: ignore[arg-type]


def test_every_family_is_tested() -> None:
    assert {family for family, _ in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize(
    "key",
    [
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("family", [family for family in FAMILIES if "deepseek" not in family])
def test_dimensions_beyond_any_model_are_refused_before_memory_is_taken(
    family: str, key: str
) -> None:
    """One mode a layer, or a row a position, of 10^12 would end in a MemoryError."""
    config = {
        "model_type": family,
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
    assert from_hf(config).layer_count == 2
    with pytest.raises(CheckpointError, match=f"config {key} = {10**12} .* at most"):
        from_hf(config | {key: 10**12})


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps"])
def test_a_number_beyond_every_float_is_refused(key: str) -> None:
    with pytest.raises(CheckpointError, match=f"config {key} = 1000.* a positive number"):
        from_hf(GOOD | {key: 10**400})
