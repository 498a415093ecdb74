"""What DeepSeek-style configs say beyond a Llama's: latent attention and experts.

Keys and what is assumed where a config is silent are those of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.models.fields import flag, number, positive, refuse


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention: a token's KV in one layer is `rank` values, of which every head
    makes its keys and values, and one key of `rope` values that turns with the position.

    q_rank          queries come from so many values, normed; None: from the hidden state
    nope, rope      the two parts of a query; `value`: width of a head's values
    interleaved     whether a pair that turns lies side by side in the checkpoint
    softmax_factor  on the usual scale (nope + rope)**-0.5
    """

    rank: int
    q_rank: int | None
    nope: int
    rope: int
    value: int
    interleaved: bool
    softmax_factor: float = 1.0

    @property
    def width(self) -> int:
        """Values that are cached for a token in one layer."""
        return self.rank + self.rope


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Layers from `first_layer` on have `count` experts of width `inner`, of which a row takes
    `chosen`, and `shared` experts' width that every row takes.

    Only the best `kept_groups` of `groups` are chosen from. `scoring`: softmax, where a group is as
    good as its best expert; or sigmoid with a bias that takes part in the choice only, where it
    is as good as its best two. `normed`: the weights are divided by their sum.
    """

    first_layer: int
    count: int
    chosen: int
    inner: int
    shared: int
    groups: int
    kept_groups: int
    scoring: Literal["softmax", "sigmoid"]
    normed: bool
    factor: float


def parse_latent(config: Mapping[str, Any], interleaved: bool) -> LatentConfig:
    """Raises CheckpointError. `interleaved` is what the model type fixes; the config may say."""
    nope, rope = positive(config, "qk_nope_head_dim"), positive(config, "qk_rope_head_dim")
    for key, value in (("head_dim", rope), ("qk_head_dim", nope + rope)):
        if config.get(key) is not None and config[key] != value:
            raise refuse(key, config[key], f"{value}, as qk_nope_head_dim and qk_rope_head_dim say")
    return LatentConfig(
        rank=positive(config, "kv_lora_rank"),
        q_rank=None if config.get("q_lora_rank") is None else positive(config, "q_lora_rank"),
        nope=nope,
        rope=rope,
        value=positive(config, "v_head_dim"),
        interleaved=flag(config, "rope_interleave", interleaved),
        softmax_factor=_softmax_factor(config),
    )


def _softmax_factor(config: Mapping[str, Any]) -> float:
    """YaRN's `mscale_all_dim` sharpens the softmax: its magnitude, once for q and once for k."""
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(values, Mapping) or not values.get("mscale_all_dim"):
        return 1.0
    factor, scale = number(values, "factor", least=1.0), number(values, "mscale_all_dim")
    return (0.1 * scale * math.log(factor) + 1.0) ** 2


def parse_experts(
    config: Mapping[str, Any], layers: int, scoring: Literal["softmax", "sigmoid"]
) -> ExpertsConfig | None:
    """None where every layer is dense. Raises CheckpointError."""
    first = config.get("first_k_dense_replace")
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise refuse("first_k_dense_replace", first, "a number of layers, 0 or more")
    if config.get("n_routed_experts") is None or first >= layers:
        return None
    for key, accepted in (("moe_layer_freq", 1), ("ep_size", 1)):
        if config.get(key, accepted) != accepted:
            raise refuse(key, config[key], repr(accepted))
    count, chosen = positive(config, "n_routed_experts"), positive(config, "num_experts_per_tok")
    groups, kept = _groups(config, count, scoring)
    if chosen > kept * (count // groups):
        most = kept * (count // groups)
        raise refuse("num_experts_per_tok", chosen, f"1 to {most}, the experts of the groups kept")
    return ExpertsConfig(
        first_layer=first,
        count=count,
        chosen=chosen,
        inner=positive(config, "moe_intermediate_size"),
        shared=positive(config, "n_shared_experts"),
        groups=groups,
        kept_groups=kept,
        scoring=scoring,
        normed=_normed(config, scoring),
        factor=number(config, "routed_scaling_factor"),
    )


def _groups(
    config: Mapping[str, Any], count: int, scoring: Literal["softmax", "sigmoid"]
) -> tuple[int, int]:
    """Groups of experts, and how many of them a row may choose from."""
    default, known = "noaux_tc", ["noaux_tc"]
    if scoring == "softmax":
        default, known = "greedy", ["greedy", "group_limited_greedy"]
    method = config.get("topk_method") or default
    if method not in known:
        raise refuse("topk_method", method, ", ".join(known))
    if (config.get("scoring_func") or scoring) != scoring:
        raise refuse("scoring_func", config["scoring_func"], scoring)
    if method == "greedy":
        return 1, 1
    groups, kept = positive(config, "n_group"), positive(config, "topk_group")
    least = 2 if scoring == "sigmoid" else 1
    if count % groups or count // groups < least:
        raise refuse("n_group", groups, f"a divisor of {count} that leaves {least} or more each")
    if kept > groups:
        raise refuse("topk_group", kept, f"1 to {groups}, the groups there are")
    return groups, kept


def _normed(config: Mapping[str, Any], scoring: Literal["softmax", "sigmoid"]) -> bool:
    normed = flag(config, "norm_topk_prob", scoring == "sigmoid")
    if normed and scoring == "softmax":
        raise refuse("norm_topk_prob", True, "false with softmax scores")
    return normed
