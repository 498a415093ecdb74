"""Rotary position embedding: every scaling a config may name, as tables of cos and sin.

A table depends on the position alone, so that a key written once stays right. Sources: linear
(arXiv 2306.15595), NTK-aware theta (`dynamic`), YaRN (arXiv 2309.00071), Llama 3.1 (arXiv
2407.21783); the formulas are those of the configs' own library, transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.models.fields import flag, number, positive, refuse

_DIALECTS = ("rope_parameters", "rope_scaling")
_ORIGINAL = "original_max_position_embeddings"
# What each type reads. `finetuned` stands in old YaRN configs and changes nothing.
_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor", _ORIGINAL}),
    "dynamic": frozenset({"factor"}),
    "yarn": frozenset(
        {"factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale"}
        | {"mscale_all_dim", "truncate", "finetuned"}
    ),
    "llama3": frozenset({"factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"}),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """`original_positions` is the length before any scaling; `attention_factor` multiplies cos and
    sin. The rest belongs to the kinds that it is named after.
    """

    theta: float
    original_positions: int
    kind: str = "default"
    factor: float = 1.0
    attention_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_truncate: bool = True
    llama3_low: float = 1.0
    llama3_high: float = 4.0

    @property
    def described(self) -> str:
        """For a handshake: `none`, or kind, factor and original length."""
        if self.kind == "default":
            return "none"
        return f"{self.kind} {self.factor:g} of {self.original_positions}"


def rope_theta(config: Mapping[str, Any], default: float | None) -> float:
    """One source of theta: flat, or in `rope_parameters`; two that disagree are refused (DF-9), and
    none where there is no default."""
    found: dict[str, float] = {}
    for prefix, values in (("", config), *((f"{d}.", config.get(d) or {}) for d in _DIALECTS)):
        if isinstance(values, Mapping) and values.get("rope_theta") is not None:
            found[f"{prefix}rope_theta"] = number(values, "rope_theta", prefix=prefix)
    if len(set(found.values())) > 1:
        raise CheckpointError(f"config gives conflicting rope theta: {found}")
    theta = next(iter(found.values()), default)
    if theta is None:
        raise refuse("rope_theta", None, "a positive number, here or in rope_parameters")
    return theta


def _dialect(config: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    """One of the two ways to write it: its set keys without theta, `rope_type` always there."""
    values = config.get(key)
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise refuse(key, values, "an object")
    nested = [name for name, value in values.items() if isinstance(value, Mapping)]
    if nested:
        raise refuse(f"{key}.{nested[0]}", values[nested[0]], "one set of values for all layers")
    own = {k: v for k, v in values.items() if v is not None and k != "rope_theta"}
    kind = own.pop("type", None)
    named = own.setdefault("rope_type", kind or "default")
    if kind not in (None, named):
        raise CheckpointError(f"config {key} gives both type {kind!r} and rope_type {named!r}")
    if not isinstance(named, str) or named not in _KEYS:
        raise refuse(f"{key}.rope_type", named, ", ".join(_KEYS))
    if own.pop("partial_rotary_factor", 1.0) != 1.0:
        raise refuse("partial_rotary_factor", values["partial_rotary_factor"], "1.0")
    unknown = sorted(own.keys() - _KEYS[named] - {"rope_type"})
    if unknown:
        accepted = ", ".join(sorted(_KEYS[named])) or "no further keys"
        raise refuse(f"{key}.{unknown[0]}", own[unknown[0]], f"for {named}: {accepted}")
    return own


def _original(config: Mapping[str, Any], values: Mapping[str, Any], positions: int) -> int:
    """The length before scaling; some models name it beside the scaling, not in it."""
    inside = positive(values, _ORIGINAL, config.get(_ORIGINAL) or positions, prefix="RoPE scaling ")
    outside = positive(config, _ORIGINAL) if config.get(_ORIGINAL) is not None else inside
    if inside != outside:
        raise CheckpointError(f"config gives conflicting {_ORIGINAL}: {outside} and {inside}")
    return inside


def parse_rope(
    config: Mapping[str, Any], head_dim: int, positions: int, default_theta: float | None
) -> Rope:
    """Reads `rope_theta` with `rope_scaling`, or `rope_parameters`; both only where they agree.

    `positions` is the config's max_position_embeddings. Raises CheckpointError.
    """
    if config.get("partial_rotary_factor", 1.0) not in (1.0, None):
        raise refuse("partial_rotary_factor", config["partial_rotary_factor"], "1.0")
    if head_dim % 2:
        raise refuse("head_dim", head_dim, "an even number")
    given = {key: d for key in _DIALECTS if (d := _dialect(config, key)) is not None}
    if len(given) == 2 and given[_DIALECTS[0]] != given[_DIALECTS[1]]:
        raise CheckpointError(f"config gives conflicting RoPE: {given}")
    where, values = next(iter(given.items()), ("", {"rope_type": "default"}))
    kind, theta = values["rope_type"], rope_theta(config, default_theta)
    if kind == "default":
        return Rope(theta, positions)
    if kind == "dynamic" and head_dim < 4:
        raise refuse("head_dim", head_dim, "4 or more with dynamic scaling")
    read = partial(number, values, prefix=f"{where}.")
    factor = read("factor", least=1.0)
    if kind in ("linear", "dynamic"):
        return Rope(theta, positions, kind, factor)
    original = _original(config, values, positions)
    if kind == "llama3":
        low, high = read("low_freq_factor"), read("high_freq_factor")
        if high <= low:
            raise refuse(f"{where}.high_freq_factor", high, f"more than low_freq_factor, {low}")
        return Rope(theta, original, kind, factor, llama3_low=low, llama3_high=high)
    if theta <= 1:
        raise refuse("rope_theta", theta, "more than 1 with yarn scaling")
    fast, slow = read("beta_fast", 32.0), read("beta_slow", 1.0)
    if fast < slow:
        raise refuse(f"{where}.beta_fast", fast, f"beta_slow, {slow}, or more")
    return Rope(
        theta,
        original,
        kind,
        factor,
        attention_factor=_yarn_attention(values, factor, read),
        yarn_beta_fast=fast,
        yarn_beta_slow=slow,
        yarn_truncate=flag(values, "truncate", True),
    )


def _yarn_attention(
    values: Mapping[str, Any], factor: float, read: Callable[[str], float]
) -> float:
    """As given; or from both mscale values; or what the paper gives for the factor."""
    if "attention_factor" in values:
        return read("attention_factor")
    if values.get("mscale") and values.get("mscale_all_dim"):
        scale, all_dim = read("mscale"), read("mscale_all_dim")
        return _magnitude(factor, scale) / _magnitude(factor, all_dim)
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def extended_positions(rope: Rope, positions: int) -> int:
    """Most positions the scaling is made for, as vLLM derives it. `positions` is the config's."""
    if rope.kind in ("linear", "dynamic", "yarn"):
        return int(rope.original_positions * rope.factor)
    return positions


def inverse_frequencies(rope: Rope, dim: int, length: int) -> Tensor:
    """Angles per position, fp32 [dim / 2]. `length` is the longest session: `dynamic` takes its
    theta from it once, for all positions, since keys already written cannot turn again.
    """
    theta, exponents = rope.theta, torch.arange(0, dim, 2, dtype=torch.float32) / dim
    if rope.kind == "dynamic" and length > rope.original_positions:
        stretch = rope.factor * length / rope.original_positions - (rope.factor - 1)
        theta *= stretch ** (dim / (dim - 2))
    plain: Tensor = 1.0 / theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "yarn":
        kept = _yarn_kept(rope, dim)
        return plain / rope.factor * (1 - kept) + plain * kept
    if rope.kind == "llama3":
        turns = rope.original_positions * plain / (2 * math.pi)
        kept = (turns - rope.llama3_low) / (rope.llama3_high - rope.llama3_low)
        kept = kept.clamp(0, 1)
        return plain / rope.factor * (1 - kept) + plain * kept
    return plain


def _yarn_kept(rope: Rope, dim: int) -> Tensor:
    """Per frequency: 1 stays as it is (it turns often within the original length), 0 is divided."""

    def dimension(turns: float) -> float:
        wavelength = rope.original_positions / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(rope.yarn_beta_fast), dimension(rope.yarn_beta_slow)
    if rope.yarn_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)
    return 1 - ramp.clamp(0, 1)


def rope_tables(
    rope: Rope, head_dim: int, rows: int, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin [rows, head_dim / 2] of the half-split rotation, row = position.

    `length` (default: rows) is the longest session; rows behind it are padding.
    """
    inverse = inverse_frequencies(rope, head_dim, rows if length is None else length)
    angles = torch.outer(torch.arange(rows, dtype=torch.float32), inverse)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
