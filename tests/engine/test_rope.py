"""RoPE scalings: whole models against transformers, real configs' frequencies, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.errors import CheckpointError, SettingRefused
from engine.models.rope import (
    extended_positions,
    inverse_frequencies,
    parse_rope,
    rope_tables,
    rope_theta,
)
from tests.engine.tiny import (
    KERNELS,
    load_tiny,
    random_ids,
    reference,
    rewrite_config,
    run,
    write_model,
)

POSITIONS = 48  # of the tiny models; texts of 30 are below, of 90 above
THETA = 700.0
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "yarn": YARN,
    "yarn-attention-factor": YARN | {"attention_factor": 1.3},
    "yarn-mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.4},
    "yarn-betas": YARN | {"beta_fast": 8.0, "beta_slow": 0.5},
    "yarn-not-truncated": YARN | {"truncate": False},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 40,
    },
}


def write(directory: Path, scaling: dict[str, Any], old_dialect: bool, **options: Any) -> Any:
    """A random Qwen3 or Llama with this scaling, its config in one of the two dialects."""
    family = "qwen3" if old_dialect else "llama"
    positions = 200 if scaling["rope_type"] == "llama3" else POSITIONS
    parameters = scaling | {"rope_theta": THETA}
    model = write_model(
        directory,
        family,
        rope_parameters=parameters,
        max_position_embeddings=positions,
        num_hidden_layers=2,
        head_dim=16,
        **options,
    )
    if old_dialect:
        old = {k: v for k, v in scaling.items() if k != "rope_type"}
        old["type"] = scaling["rope_type"]
        rewrite_config(
            directory, {"rope_parameters": None, "rope_theta": THETA, "rope_scaling": old}
        )
    return model


@pytest.mark.parametrize("old_dialect", [False, True], ids=["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_scaling_equals_transformers(
    tmp_path: Path, scaling: dict[str, Any], old_dialect: bool
) -> None:
    model = write(tmp_path, scaling, old_dialect)
    for kernels in KERNELS:
        engine = load_tiny(tmp_path, kernels)
        assert engine.info.max_length >= 90
        for count in (30, 90):
            ids, table = random_ids(count, seed=count), engine.allocate(96)
            edges = range(0, count, 25)
            parts = [run(engine, [(table, ids[at : at + 25], at)])[0][0] for at in edges]
            logits = torch.cat(parts)
            torch.testing.assert_close(logits, reference(model, ids), atol=1e-4, rtol=1e-4)
            table.free()


@pytest.mark.parametrize("kernels", KERNELS)
def test_dynamic_is_fixed_by_the_length_of_the_engine(tmp_path: Path, kernels: str) -> None:
    """Transformers turns all keys again as a text grows; keys in a cache cannot. At the original
    length nothing is scaled; a longer limit takes the theta of a text that long, once.
    """
    model = write(tmp_path, {"rope_type": "dynamic", "factor": 3.0}, old_dialect=True)
    plain = load_tiny(tmp_path, kernels)
    assert plain.info.max_length == POSITIONS
    longer = load_tiny(tmp_path, kernels, max_length=90)
    assert longer.info.max_length == 90
    longest = 3 * POSITIONS
    assert load_tiny(tmp_path, kernels, max_length=longest).info.max_length == longest
    with pytest.raises(SettingRefused, match=rf"max_length = 1000 .* accepted: 2 to {longest}"):
        load_tiny(tmp_path, kernels, max_length=1000)
    for engine, count in ((plain, 30), (plain, POSITIONS), (longer, 90)):
        ids, table = random_ids(count, seed=count), engine.allocate(96)
        first, rest = (
            run(engine, [(table, p, at)])[0][0] for p, at in ((ids[:7], 0), (ids[7:], 7))
        )
        torch.testing.assert_close(
            torch.cat((first, rest)), reference(model, ids), atol=1e-4, rtol=1e-4
        )
        table.free()
    # Two limits give other bits, so they are no replicas of each other.
    assert plain.info.numerics != longer.info.numerics


# As published: Llama 3.1 and 3.2, Qwen3 with YaRN, DeepSeek's mscale, Yi and Vicuna style.
REAL: dict[str, tuple[int, int, float, dict[str, Any]]] = {
    "llama-3.1": (
        128,
        131072,
        5e5,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "qwen3-yarn": (
        128,
        40960,
        1e6,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "mscale": (
        64,
        163840,
        1e4,
        {
            "rope_type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
    ),
    "linear": (80, 4096, 1e4, {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (96, 4096, 5e6, {"rope_type": "dynamic", "factor": 2.0}),
}


@pytest.mark.parametrize("name", REAL)
def test_frequencies_of_real_configs(name: str) -> None:
    dim, positions, theta, scaling = REAL[name]
    values = {"rope_parameters": scaling | {"rope_theta": theta}}
    their_config = AutoConfig.for_model(
        "qwen3", head_dim=dim, max_position_embeddings=positions, **values
    )
    length = 3 * positions // 2
    theirs, attention = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](
        their_config, torch.device("cpu"), seq_len=length
    )
    rope = parse_rope(values, dim, positions, 1e4)
    torch.testing.assert_close(inverse_frequencies(rope, dim, length), theirs, atol=0, rtol=1e-5)
    assert rope.attention_factor == pytest.approx(attention)
    assert rope.described.startswith(scaling["rope_type"])
    cos, sin = rope_tables(rope, dim, 70, length)
    angles = torch.arange(70.0)[:, None] * theirs
    torch.testing.assert_close(cos, angles.cos() * attention, atol=1e-4, rtol=0)
    torch.testing.assert_close(sin, angles.sin() * attention, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "limit"),
    [("llama-3.1", 131072), ("qwen3-yarn", 131072), ("mscale", 163840), ("linear", 16384)],
)
def test_limits_follow_the_scaling(name: str, limit: int) -> None:
    dim, positions, _, scaling = REAL[name]
    rope = parse_rope({"rope_scaling": scaling}, dim, positions, 1e4)
    assert extended_positions(rope, positions) == limit


LINEAR = {"type": "linear", "factor": 2.0}
LLAMA3 = SCALINGS["llama3"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"rope_scaling": {"type": "su"}},
            "rope_type = 'su' .* default, linear, dynamic, yarn, ll",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type = 'longrope'"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear' .* object"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor = None"),
        ({"rope_scaling": LINEAR | {"factor": 0.5}}, "factor = 0.5 .* 1 or more"),
        ({"rope_scaling": LINEAR | {"factor": "2"}}, "factor = '2'"),
        ({"rope_scaling": LINEAR | {"factor": float("nan")}}, "factor = nan"),
        ({"rope_scaling": LINEAR | {"rope_type": "yarn"}}, "both type 'linear' and rope_type"),
        ({"rope_scaling": LINEAR | {"mrope_section": [16, 24]}}, "rope_scaling.mrope_section"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 9}}, "alpha = 9"),
        ({"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}}, "conflicting RoPE"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "for all layers"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "more than low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": None}}, "low_freq_factor = None"),
        ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 7}, "conflicting original"),
        ({"rope_scaling": YARN | {"beta_fast": 0.5}}, "beta_fast = 0.5"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "truncate"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta = 1.0 .* more than 1"),
        ({"rope_theta": -1.0}, "rope_theta = -1.0"),
        ({"rope_theta": True}, "rope_theta = True"),
    ],
)
def test_refusals(config: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        parse_rope(config, 16, 64, 1e4)


def test_harmless_keys_and_both_dialects_that_agree() -> None:
    finetuned = parse_rope({"rope_scaling": YARN | {"finetuned": True}}, 16, 64, 1e4)
    assert finetuned == parse_rope({"rope_scaling": YARN}, 16, 64, 1e4)
    both = {"rope_theta": 5.0, "rope_scaling": LINEAR, "rope_parameters": LINEAR}
    assert parse_rope(both, 16, 64, 1e4).theta == 5.0
    assert parse_rope({"rope_scaling": None}, 16, 64, 1e4).described == "none"


def test_theta_has_one_source_df9() -> None:
    """DF-9: theta may stand in two places; a stale one is a conflict, never a silent choice."""
    assert rope_theta({"rope_theta": 5000.0}, 1.0) == 5000.0
    assert rope_theta({"rope_parameters": {"rope_theta": 7e5}}, 1.0) == 7e5
    assert rope_theta({"rope_theta": 7e5, "rope_parameters": {"rope_theta": 7e5}}, 1.0) == 7e5
    assert rope_theta({}, 1e4) == 1e4
    with pytest.raises(CheckpointError, match="conflicting rope theta"):
        rope_theta({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, 1.0)
