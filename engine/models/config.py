"""The explicit internal description of a target; nothing is inferred from names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.attention.layers import FULL, SLIDING, layer_types, model_modes
from engine.attention.mode import LayerMode
from engine.errors import CheckpointError
from engine.models.fields import flag, number, positive, refuse, token_ids
from engine.models.latent_config import (
    ExpertsConfig,
    LatentConfig,
    parse_experts,
    parse_latent,
)
from engine.models.rope import Rope, extended_positions, parse_rope

_QWENS = ("qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """`modes` has one entry per layer. `max_positions` is the most that a session may have.

    With `latent` attention `kv_heads` is 1 and `head_dim` what is cached: the latent values and the
    key that turns. Its biases are those of the products from and to the hidden state.
    `unread_layers` stand in the checkpoint behind the last: they predict further tokens.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_eps: float
    rope: Rope
    max_positions: int
    tied_head: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    head_norms: bool
    modes: tuple[LayerMode, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None
    unread_layers: int = 0

    @property
    def default_length(self) -> int:
        """Longest session where the settings name none. `dynamic` scaling turns all positions
        otherwise once the limit is above the original length, so that is left to the settings.
        """
        dynamic = self.rope.kind == "dynamic"
        return self.rope.original_positions if dynamic else self.max_positions


@dataclass(frozen=True, slots=True)
class Family:
    """What a model type fixes. A bias is fixed, or a flag of the config; `defaults` are what
    transformers assumes where a config.json is silent. `scoring`, of experts, stands for latent
    attention too.
    """

    architecture: str
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    head_norms: bool = False
    scoring: Literal["", "softmax", "sigmoid"] = ""
    defaults: tuple[tuple[str, Any], ...] = ()


_QWEN = (
    ("num_key_value_heads", 32),
    ("max_position_embeddings", 32768),
    ("use_sliding_window", False),
    ("sliding_window", 4096),
    ("max_window_layers", 28),
)
_MISTRAL = (
    ("num_key_value_heads", 8),
    ("max_position_embeddings", 131072),
    ("sliding_window", 4096),
)
_LATENT = (
    ("kv_lora_rank", 512),
    ("qk_nope_head_dim", 128),
    ("qk_rope_head_dim", 64),
    ("v_head_dim", 128),
)
_DEEPSEEK_V2 = (
    *_LATENT,
    ("q_lora_rank", 1536),
    ("max_position_embeddings", 2048),
    ("first_k_dense_replace", 0),
    ("n_routed_experts", 64),
    ("n_shared_experts", 2),
    ("moe_intermediate_size", 1407),
    ("routed_scaling_factor", 1.0),
)
_DEEPSEEK_V3 = (
    *_LATENT,
    ("q_lora_rank", 1536),
    ("max_position_embeddings", 4096),
    ("first_k_dense_replace", 3),
    ("n_routed_experts", 256),
    ("n_shared_experts", 1),
    ("num_experts_per_tok", 8),
    ("moe_intermediate_size", 2048),
    ("routed_scaling_factor", 2.5),
    ("n_group", 8),
    ("topk_group", 4),
)
FAMILIES: dict[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        "attention_bias",
        "attention_bias",
        "mlp_bias",
        defaults=(("max_position_embeddings", 2048),),
    ),
    "mistral": Family("MistralForCausalLM", defaults=_MISTRAL),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, defaults=_QWEN),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "attention_bias",
        "attention_bias",
        head_norms=True,
        defaults=(*_QWEN, ("head_dim", 128)),
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        "attention_bias",
        "attention_bias",
        "mlp_bias",
        scoring="softmax",
        defaults=_DEEPSEEK_V2,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        "attention_bias",
        "attention_bias",
        scoring="sigmoid",
        defaults=_DEEPSEEK_V3,
    ),
}
_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)


def _refuse_unsupported(config: Mapping[str, Any], family: Family) -> None:
    if config.get("architectures") not in (None, [family.architecture]):
        raise refuse("architectures", config["architectures"], f"['{family.architecture}']")
    for key in () if family.scoring else _EXPERTS:
        if config.get(key):
            raise refuse(key, config[key], "dense models only, without experts")
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            inner = config[key] if isinstance(config[key], Mapping) else {}
            kind = inner.get("quant_method", "present")
            raise refuse(f"{key}.quant_method", kind, "weights in bf16, fp16 or fp32")
    fixed: tuple[tuple[str, Any], ...] = (
        ("hidden_act", "silu"),
        ("use_mrope", False),
        ("rope_interleaved", False),
    )
    for key, accepted in fixed:
        if config.get(key, accepted) != accepted:
            raise refuse(key, config[key], repr(accepted))


def _modes(config: Mapping[str, Any], count: int) -> tuple[LayerMode, ...]:
    """Windows per layer; keys that contradict each other are refused. Mistral: `sliding_window` on
    every layer. Qwen: with `use_sliding_window` from layer `max_window_layers` on, or where
    `layer_types` says so. The others have none.
    """
    model_type, types = config["model_type"], layer_types(config, count)
    window = config.get("sliding_window") is not None
    if model_type == "mistral":
        if types and any(window != (kind == SLIDING) for kind in types):
            raise refuse("layer_types", types, "what sliding_window says, for every layer")
    elif model_type not in _QWENS or not flag(config, "use_sliding_window") or not window:
        if types and SLIDING in types:
            accepted = f"{FULL} only without use_sliding_window and sliding_window"
            raise refuse("layer_types", types, accepted)
        return (LayerMode(),) * count
    elif not types:
        first = config["max_window_layers"]
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise refuse("max_window_layers", first, "a number of layers, 0 or more")
    return model_modes(config)


def read_heads(config: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """Query heads, KV heads and head_dim. An absent head_dim is hidden / heads."""
    heads = positive(config, "num_attention_heads")
    silent = config.get("num_key_value_heads") is None
    kv_heads = heads if silent else positive(config, "num_key_value_heads")
    if heads % kv_heads:
        raise refuse("num_key_value_heads", kv_heads, f"a divisor of {heads}")
    if config.get("head_dim") is not None:
        return heads, kv_heads, positive(config, "head_dim")
    if hidden % heads:
        raise refuse("num_attention_heads", heads, f"a divisor of {hidden}, or a head_dim")
    return heads, kv_heads, hidden // heads


def _special_id(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise refuse(key, value, "an id")
    return value


def _unread_layers(config: Mapping[str, Any]) -> int:
    key = "num_nextn_predict_layers"
    return positive(config, key) if config.get(key) else 0


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Reads a Hugging Face config.json of a supported family; refuses by name what the engine does
    not do. Raises CheckpointError.
    """
    if not isinstance(raw, Mapping):
        raise CheckpointError("config.json is not a JSON object")
    model_type = raw.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise refuse("model_type", model_type, ", ".join(FAMILIES))
    _refuse_unsupported(raw, family)
    config = dict(family.defaults) | dict(raw)

    def bias(rule: bool | str) -> bool:
        return flag(config, rule) if isinstance(rule, str) else rule

    layer_count, hidden = positive(config, "num_hidden_layers"), positive(config, "hidden_size")
    positions = positive(config, "max_position_embeddings")
    latent = experts = None
    if family.scoring:
        latent = parse_latent(config, interleaved=True)
        experts = parse_experts(config, layer_count, family.scoring)
        heads, kv_heads, head_dim = positive(config, "num_attention_heads"), 1, latent.width
        rope = parse_rope(config, latent.rope, positions, default_theta=10000.0)
    else:
        heads, kv_heads, head_dim = read_heads(config, hidden)
        rope = parse_rope(config, head_dim, positions, default_theta=10000.0)
    return ModelConfig(
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=positive(config, "intermediate_size"),
        layer_count=layer_count,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=number(config, "rms_norm_eps", 1e-6),
        rope=rope,
        max_positions=extended_positions(rope, positions),
        tied_head=flag(config, "tie_word_embeddings"),
        qkv_bias=bias(family.qkv_bias),
        out_bias=bias(family.out_bias),
        mlp_bias=bias(family.mlp_bias),
        head_norms=family.head_norms,
        modes=_modes(config, layer_count),
        bos_token_id=_special_id(config, "bos_token_id"),
        pad_token_id=_special_id(config, "pad_token_id"),
        eos_token_ids=token_ids(config.get("eos_token_id")),
        latent=latent,
        experts=experts,
        unread_layers=_unread_layers(config) if latent else 0,
    )
