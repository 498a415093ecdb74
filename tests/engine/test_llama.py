"""The Llama forward against transformers, fp32, 1e-4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from engine.errors import CheckpointError
from engine.models.config import from_hf, rope_theta
from engine.runner import NativeEngine
from tests.engine.tiny import HIDDEN, KERNELS, LAYERS, load_tiny, random_ids, reference, run
from tests.engine.tiny import write_llama as write

Pair = tuple[LlamaForCausalLM, NativeEngine]


@pytest.fixture(scope="module", params=KERNELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = tmp_path_factory.mktemp("llama")
    return write(directory), load_tiny(directory, request.param)


def close(own: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(own, other, atol=1e-4, rtol=1e-4)


def test_prefill(pair: Pair) -> None:
    model, engine = pair
    ids = random_ids(37)
    table = engine.allocate(64)
    (logits,), _ = run(engine, [(table, ids, 0)])
    close(logits, reference(model, ids))
    table.free()


@pytest.mark.parametrize("chunk", [1, 7, 16, 30])
def test_chunked_prefill(pair: Pair, chunk: int) -> None:
    model, engine = pair
    ids = random_ids(41, seed=chunk)
    table = engine.allocate(64)
    parts = [run(engine, [(table, ids[at : at + chunk], at)])[0][0] for at in range(0, 41, chunk)]
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


def test_tied_head_and_own_head_dim(tmp_path: Path) -> None:
    model = write(tmp_path, tie_word_embeddings=True, head_dim=24)
    engine = load_tiny(tmp_path, KERNELS[0])
    ids = random_ids(9)
    (logits,), _ = run(engine, [(engine.allocate(16), ids, 0)])
    close(logits, reference(model, ids))


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


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "qwen3"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "theta"),
    ],
)
def test_config_refuses_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        from_hf(GOOD | change)


def test_theta_has_one_source_df9() -> None:
    assert from_hf(GOOD).rope_theta == 5000.0
    assert rope_theta({"rope_parameters": {"rope_theta": 7e5}}, 1.0) == 7e5
    assert rope_theta({"rope_theta": 7e5, "rope_parameters": {"rope_theta": 7e5}}, 1.0) == 7e5
    assert rope_theta({}, 1e4) == 1e4
