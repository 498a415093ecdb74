"""DFlash block logits against a reference written here from the equations, and loader refusals."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.attention.base import LayerMode
from engine.attention.layers import draft_modes
from engine.errors import CheckpointError
from engine.kv.pool import PageTable
from engine.models.dflash import Block, DFlashModel
from engine.models.draft_loading import load_dflash
from engine.models.draft_options import DFlashOptions
from engine.models.rope import rope_theta
from tests.engine.tiny import HIDDEN, KERNELS, VOCAB, write_llama

HEADS, KV_HEADS, DIM, INNER, BLOCK, MASK, TAPS = 4, 2, 24, 80, 5, 9, (0, 3)
WIDTH = len(TAPS) * HIDDEN
BASE: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": BLOCK,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 700.0,
    "max_position_embeddings": 256,
    "vocab_size": VOCAB,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)},
}
S, F = "sliding_attention", "full_attention"


def nested(**values: Any) -> dict[str, Any]:
    return {"dflash_config": BASE["dflash_config"] | values}


# Section names follow the causality table: what a 3-layer draft must give.
CASES: dict[str, tuple[dict[str, Any], list[LayerMode]]] = {
    "plain": ({}, [LayerMode(False)] * 3),
    "use_swa": (nested(use_swa=True, swa_window_size=8), [LayerMode(False, 8)] * 3),
    "mixed": (
        {"layer_types": [S, S, F], "sliding_window": 6},
        [LayerMode(True, 6), LayerMode(True, 6), LayerMode(False)],
    ),
    "full_with_swa": (
        {"layer_types": [F, F, F], **nested(use_swa=True, swa_window_size=7)},
        [LayerMode(False, 7)] * 3,
    ),
    "is_causal_false": (
        {"layer_types": [S, S, F], "sliding_window": 6, "is_causal": False},
        [LayerMode(False, 6), LayerMode(False, 6), LayerMode(False)],
    ),
    "is_causal_wins": ({"is_causal": True, **nested(causal=False)}, [LayerMode(True)] * 3),
    "nested_causal": (nested(causal=True), [LayerMode(True)] * 3),
}


def write_draft(directory: Path, change: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """A random draft beside a tiny target in `directory`/target; returns the draft's tensors."""
    torch.manual_seed(4)
    state = {
        "fc.weight": torch.randn(HIDDEN, WIDTH) / WIDTH**0.5,
        "hidden_norm.weight": torch.rand(HIDDEN) + 0.5,
        "norm.weight": torch.rand(HIDDEN) + 0.5,
    }
    shapes = {
        "self_attn.q_proj": (HEADS * DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    for i in range(3):
        for name, shape in shapes.items():
            state[f"layers.{i}.{name}.weight"] = torch.randn(shape) / shape[1] ** 0.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"layers.{i}.{name}.weight"] = torch.rand(HIDDEN) + 0.5
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            state[f"layers.{i}.{name}.weight"] = torch.rand(DIM) + 0.5
    directory.mkdir(parents=True, exist_ok=True)
    save_file(state, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(BASE | (change or {})))
    return state


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    write_llama(directory)
    return directory


def load(directory: Path, target: Path, kernels: str = "torch", **options: Any) -> DFlashModel:
    chosen = DFlashOptions(page_count=64, weight_dtype=torch.float32, kernels=kernels, **options)
    return load_dflash(directory, str(target), chosen).model


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Half-split rotation of x [heads, n, DIM], theta 700."""
    frequencies = 700.0 ** (-torch.arange(DIM // 2) / (DIM // 2))
    angles = positions[:, None] * frequencies
    a, b = x[..., : DIM // 2], x[..., DIM // 2 :]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def reference_states(
    state: dict[str, Tensor],
    modes: list[LayerMode],
    embedding: Tensor,
    taps: Tensor,
    anchor: int,
    stretch: float = 1.0,
) -> Tensor:
    """Final states [BLOCK, HIDDEN] of one block whose context is every row of `taps`, in fp64;
    linear scaling divides positions by `stretch`.
    """
    w = {name: tensor.double() for name, tensor in state.items()}
    start = len(taps)
    context = norm(taps.double() @ w["fc.weight"].T, w["hidden_norm.weight"])
    h = embedding.double()[[anchor] + [MASK] * (BLOCK - 1)]
    keys_at = torch.arange(start + BLOCK).double() / stretch
    for i, mode in enumerate(modes):
        layer = {n.split(".", 2)[2]: t for n, t in w.items() if n.startswith(f"layers.{i}.")}

        def heads(x: Tensor, name: str, layer: dict[str, Tensor] = layer) -> Tensor:
            return (x @ layer[f"self_attn.{name}_proj.weight"].T).unflatten(1, (-1, DIM))

        u = norm(h, layer["input_layernorm.weight"])
        both = torch.cat((context, u))
        q = norm(heads(u, "q"), layer["self_attn.q_norm.weight"]).transpose(0, 1)
        k = norm(heads(both, "k"), layer["self_attn.k_norm.weight"]).transpose(0, 1)
        v = heads(both, "v").transpose(0, 1)
        q, k = rotate(q, keys_at[start:]), rotate(k, keys_at)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (k, v))
        scores = q @ k.transpose(1, 2) / DIM**0.5
        for row in range(BLOCK):
            for column in range(start + BLOCK):
                distance = start + row - column
                hidden = mode.causal and distance < 0
                if mode.window is not None:
                    hidden |= abs(distance) >= mode.window
                if hidden:
                    scores[:, row, column] = -torch.inf
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        h = h + attended @ layer["self_attn.o_proj.weight"].T
        u = norm(h, layer["post_attention_layernorm.weight"])
        gate = u @ layer["mlp.gate_proj.weight"].T
        up = u @ layer["mlp.up_proj.weight"].T
        h = h + (gate * gate.sigmoid() * up) @ layer["mlp.down_proj.weight"].T
    return norm(h, w["norm.weight"])


def reference_block(
    state: dict[str, Tensor],
    modes: list[LayerMode],
    embedding: Tensor,
    head: Tensor,
    taps: Tensor,
    anchor: int,
    stretch: float = 1.0,
) -> Tensor:
    """Logits [BLOCK, vocabulary]."""
    return reference_states(state, modes, embedding, taps, anchor, stretch) @ head.double().T


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def context(model: DFlashModel, taps: Tensor, cuts: tuple[int, ...] = ()) -> PageTable:
    table = model.pool.allocate(0)
    edges = (0, *cuts, len(taps))
    for start, end in pairwise(edges):
        model.write_context(table, start, taps[start:end])
    return table


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", CASES)
def test_block_logits_follow_the_equations(
    tmp_path: Path, target: Path, case: str, kernels: str
) -> None:
    """DF-20: causality and window are each layer's own."""
    change, modes = CASES[case]
    state = write_draft(tmp_path, change)
    model = load(tmp_path, target, kernels)
    assert list(model.config.modes) == modes
    weights = load_file(target / "model.safetensors")
    sessions = [(rows(21, 1), 7), (rows(3, 2), 11), (rows(40, 3), 90)]  # one ragged batch
    blocks = [Block(context(model, taps, (2,)), anchor, len(taps)) for taps, anchor in sessions]
    logits = model.propose_logits(blocks)
    assert logits.shape == (3, BLOCK - 1, VOCAB)
    for own, (taps, anchor) in zip(logits, sessions, strict=True):
        head, embedding = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
        expected = reference_block(state, modes, embedding, head, taps, anchor)[1:]
        torch.testing.assert_close(own.double(), expected, atol=1e-4, rtol=1e-4)


def test_a_draft_has_its_own_rope_scaling_df33_df34(tmp_path: Path, target: Path) -> None:
    """Scaling comes from the draft's config alone, and its table reaches as far as it scales."""
    change = {"rope_scaling": {"type": "linear", "factor": 2.5}}
    state, taps = write_draft(tmp_path, change), rows(40, 3)
    model, weights = load(tmp_path, target), load_file(target / "model.safetensors")
    assert (model.config.max_positions, model.config.rope.described) == (640, "linear 2.5 of 256")
    head, embedding = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
    modes = [LayerMode(False)] * 3
    expected = reference_block(state, modes, embedding, head, taps, 7, stretch=2.5)[1:]
    own = model.propose_logits([Block(context(model, taps), 7, 40)])[0]
    torch.testing.assert_close(own.double(), expected, atol=1e-4, rtol=1e-4)
    far = model.pool.allocate(0)
    model.write_context(far, 600, taps[:20], origin=600)
    assert model.propose_logits([Block(far, 7, 620, origin=600)]).isfinite().all()
    write_draft(tmp_path, {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert load(tmp_path, target).config.max_positions == 256


@pytest.mark.parametrize("kernels", KERNELS)
def test_context_at_or_after_the_anchor_is_never_seen_df2_df3(
    tmp_path: Path, target: Path, kernels: str
) -> None:
    write_draft(tmp_path)
    model = load(tmp_path, target, kernels)
    clean = context(model, rows(20))
    expected = model.propose_logits([Block(clean, 5, 20)])
    # Rows of rejected tokens were written at 20 .. 29; the table is cut back to the anchor.
    dirty = context(model, torch.cat((rows(20), 50 * rows(10, seed=8))))
    dirty.truncate(20)
    assert torch.equal(model.propose_logits([Block(dirty, 5, 20)]), expected)
    # Nothing of a block stays behind either.
    model.propose_logits([Block(dirty, 77, 20)])
    assert torch.equal(model.propose_logits([Block(dirty, 5, 20)]), expected)
    # The last context row does matter.
    moved = rows(20)
    moved[19] += 1
    assert not torch.equal(model.propose_logits([Block(context(model, moved), 5, 20)]), expected)


def test_a_block_starts_at_its_absolute_position_df10(tmp_path: Path, target: Path) -> None:
    write_draft(tmp_path)
    model = load(tmp_path, target)
    taps = rows(12)
    late = model.pool.allocate(0)
    model.write_context(late, 100, taps, origin=100)
    # RoPE is relative: a context that begins late gives the same block as one that begins at 0.
    shifted = model.propose_logits([Block(late, 5, 112, origin=100)])
    at_zero = model.propose_logits([Block(context(model, taps), 5, 12)])
    torch.testing.assert_close(shifted, at_zero, atol=1e-3, rtol=1e-3)


def test_fewer_slots_and_a_trimmed_head_change_no_logit(tmp_path: Path, target: Path) -> None:
    write_draft(tmp_path)
    model = load(tmp_path, target)
    full = model.propose_logits([Block(context(model, rows(9)), 5, 9)])
    some = model.propose_logits([Block(context(model, rows(9)), 5, 9)], 2)
    torch.testing.assert_close(some, full[:, :2])
    trimmed = load(tmp_path, target, head_rows=40)
    short = trimmed.propose_logits([Block(context(trimmed, rows(9)), 5, 9)])
    torch.testing.assert_close(short, full[..., :40])
    with pytest.raises(CheckpointError, match="head_rows"):
        load(tmp_path, target, head_rows=VOCAB + 1)


def without(key: str) -> dict[str, Any]:
    return {"dflash_config": {k: v for k, v in BASE["dflash_config"].items() if k != key}}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param(without("mask_token_id"), "mask_token_id = None", id="df11-no-mask"),
        pytest.param(nested(mask_token_id=0), "mask_token_id = 0", id="df11-mask-is-pad"),
        pytest.param(nested(mask_token_id=1), "mask_token_id = 1", id="df11-mask-is-bos"),
        pytest.param(nested(mask_token_id=2), "mask_token_id = 2", id="df11-mask-is-eos"),
        pytest.param(nested(mask_token_id=-1), "mask_token_id = -1", id="df12-negative"),
        pytest.param(nested(mask_token_id=VOCAB), "mask_token_id = 96", id="df12-vocabulary"),
        pytest.param(without("target_layer_ids"), "no default", id="df31-no-taps"),
        pytest.param(nested(target_layer_ids=[]), "no default", id="df31-empty-taps"),
        pytest.param(nested(target_layer_ids=[2, 0]), "increasing", id="df32-unsorted"),
        pytest.param(nested(target_layer_ids=[1, 1]), "increasing", id="df32-duplicate"),
        pytest.param(nested(target_layer_ids=[1, 4]), "target's layers", id="tap-beyond-target"),
        pytest.param({"dflash_config": None}, "dflash_config is missing", id="no-dflash-config"),
        pytest.param({"architectures": ["Qwen3"]}, "architectures", id="architecture"),
        pytest.param({"hidden_size": 32}, "hidden_size = 32", id="df35-hidden"),
        pytest.param({"target_hidden_size": 96}, "target_hidden_size", id="df35-target-hidden"),
        pytest.param({"num_target_layers": 30}, "num_target_layers", id="target-layers"),
        pytest.param({"vocab_size": 50}, "vocab_size = 50", id="df25-vocabulary"),
        pytest.param(
            {"rope_parameters": {"rope_theta": 1e6}}, "conflicting rope theta", id="df9-theta"
        ),
        pytest.param({"rope_scaling": {"rope_type": "longrope"}}, "rope_type", id="rope-scaling"),
        pytest.param(
            {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.factor", id="rope-no-factor"
        ),
        pytest.param({"layer_types": [S, F, F]}, "sliding_window", id="window-missing"),
        pytest.param({"layer_types": [F, F]}, "layer_types", id="layer-count"),
        pytest.param({"block_size": 1}, "block_size", id="block-too-small"),
        pytest.param(nested(sample_from_anchor=True), "sample_from_anchor", id="df44-slots"),
        pytest.param(nested(attention_sink_bias=True), "attention_sink_bias", id="sinks"),
        pytest.param({"draft_vocab_size": 48}, "draft_vocab_size 48", id="df25-draft-vocabulary"),
        pytest.param({"logit_scale": 2.0}, "logit_scale", id="logit-scale"),
        pytest.param(nested(output_multiplier=2.0), "output_multiplier", id="multiplier"),
    ],
)
def test_loader_refuses(tmp_path: Path, target: Path, change: dict[str, Any], named: str) -> None:
    write_draft(tmp_path, change)
    with pytest.raises(CheckpointError, match=named):
        load(tmp_path, target)


def test_tensors_are_strict(tmp_path: Path, target: Path) -> None:
    state = write_draft(tmp_path)
    save_file(state | {"mask_hidden": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="mask_hidden"):
        load(tmp_path, target)
    del state["layers.1.self_attn.k_norm.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_norm\.weight is missing"):
        load(tmp_path, target)


def test_theta_from_both_forms_df9() -> None:
    assert rope_theta(BASE, 1e6) == rope_theta({"rope_parameters": {"rope_theta": 700.0}}, 1e6)
    assert draft_modes(BASE | {"num_hidden_layers": 1}) == (LayerMode(False),)
