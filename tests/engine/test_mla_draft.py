"""Block drafts with latent attention: logits against the equations in fp64, with keys and values of
every head made as they are written there, and what a config must say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import CheckpointError
from engine.models.dflash import Block, DFlashModel
from engine.models.draft_loading import load_dflash, load_dspark
from engine.models.draft_options import DFlashOptions
from engine.models.dspark import DSparkModel
from tests.engine.tiny import HIDDEN, KERNELS, LATENT, LAYERS, VOCAB, write_model

HEADS, RANK, NOPE, ROPE, VALUE, Q_RANK = 4, 24, 12, 8, 20, 28
INNER, BLOCK, MASK, DRAFT_LAYERS, MARKOV, TAPS = 80, 5, 9, 2, 6, (0, 2)
THETA, EPS = 700.0, 1e-5
BODY: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "block_size": BLOCK,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": DRAFT_LAYERS,
    "num_attention_heads": HEADS,
    "q_lora_rank": None,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "rope_interleave": False,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 256,
    "vocab_size": VOCAB,
    "num_target_layers": LAYERS,
}
DFLASH = BODY | {
    "architectures": ["DFlashDraftModel"],
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAPS)},
}
FACTOR, ALL_DIM = 4.0, 1.3
DSPARK = BODY | {
    "architectures": ["Qwen3DSparkModel"],
    "q_lora_rank": Q_RANK,
    "rope_interleave": True,
    "mask_token_id": MASK,
    "target_layer_ids": list(TAPS),
    "markov_rank": MARKOV,
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
    "sample_from_anchor": True,
    "tie_word_embeddings": False,
    # These betas keep all frequencies as they are: only the softmax gets sharper.
    "rope_scaling": {
        "rope_type": "yarn", "factor": FACTOR, "original_max_position_embeddings": 64,
        "beta_fast": 1e-3, "beta_slow": 1e-4, "mscale": ALL_DIM, "mscale_all_dim": ALL_DIM,
    },
}  # fmt: skip


def write_draft(directory: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """A random draft; returns its tensors."""
    torch.manual_seed(4)
    rank = config["q_lora_rank"]
    query = {"self_attn.q_proj": (HEADS * (NOPE + ROPE), HIDDEN)}
    norms = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
    norms["self_attn.kv_a_layernorm"] = RANK
    if rank:
        query = {
            "self_attn.q_a_proj": (rank, HIDDEN),
            "self_attn.q_b_proj": (HEADS * (NOPE + ROPE), rank),
        }
        norms["self_attn.q_a_layernorm"] = rank
    shapes = query | {
        "self_attn.kv_a_proj_with_mqa": (RANK + ROPE, HIDDEN),
        "self_attn.kv_b_proj": (HEADS * (NOPE + VALUE), RANK),
        "self_attn.o_proj": (HIDDEN, HEADS * VALUE),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    taps = config.get("target_layer_ids") or config["dflash_config"]["target_layer_ids"]
    width = len(taps) * HIDDEN
    state = {"fc.weight": torch.randn(HIDDEN, width) / width**0.5}
    for name in ("hidden_norm", "norm"):
        state[f"{name}.weight"] = torch.rand(HIDDEN) + 0.5
    for i in range(DRAFT_LAYERS):
        for name, shape in shapes.items():
            state[f"layers.{i}.{name}.weight"] = 1.5 * torch.randn(shape) / shape[1] ** 0.5
        for name, size in norms.items():
            state[f"layers.{i}.{name}.weight"] = torch.rand(size) + 0.5
    if "markov_rank" in config:
        for name in ("markov_w1", "markov_w2"):
            state[f"markov_head.{name}.weight"] = torch.randn(VOCAB, MARKOV)
        joint = {"gated": ("gate_proj", 1, 1), "rnn": ("joint_proj", 3, 2)}
        if config["markov_head_type"] in joint:
            name, parts, inputs = joint[config["markov_head_type"]]
            shape = (parts * MARKOV, HIDDEN + inputs * MARKOV)
            state[f"markov_head.{name}.weight"] = torch.randn(shape) / shape[1] ** 0.5
            state[f"markov_head.{name}.bias"] = torch.randn(shape[0])
    directory.mkdir(parents=True, exist_ok=True)
    save_file(state, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return state


def norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, positions: Tensor, config: dict[str, Any]) -> Tensor:
    """Rotation of x [..., n, ROPE]: value pairs as complex numbers."""
    angles = positions[:, None] * THETA ** (-torch.arange(ROPE // 2) / (ROPE // 2))
    if config["rope_interleave"]:
        real, imaginary = x[..., 0::2], x[..., 1::2]
    else:
        real, imaginary = x[..., : ROPE // 2], x[..., ROPE // 2 :]
    spun = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((spun.real, spun.imag), -1)  # the order does not matter to a product


def block_states(
    state: dict[str, Tensor], config: dict[str, Any], taps: Tensor, embedding: Tensor, anchor: int
) -> Tensor:
    """Final states [BLOCK, HIDDEN] of a block behind the context `taps` [n, 2 * HIDDEN]."""
    w = {name: tensor.double() for name, tensor in state.items()}
    scale = (NOPE + ROPE) ** -0.5
    if "rope_scaling" in config:
        scale *= (0.1 * ALL_DIM * math.log(FACTOR) + 1) ** 2
    context = norm(taps.double() @ w["fc.weight"].T, w["hidden_norm.weight"])
    h = embedding.double()[[anchor] + [MASK] * (BLOCK - 1)]
    positions = torch.arange(len(taps) + BLOCK).double()
    for i in range(DRAFT_LAYERS):
        p = {n.removeprefix(f"layers.{i}."): t for n, t in w.items()}
        u = norm(h, p["input_layernorm.weight"])
        down = torch.cat((context, u)) @ p["self_attn.kv_a_proj_with_mqa.weight"].T
        latent = norm(down[:, :RANK], p["self_attn.kv_a_layernorm.weight"], 1e-6)
        key = turned(down[:, RANK:], positions, config)
        both = (latent @ p["self_attn.kv_b_proj.weight"].T).unflatten(1, (HEADS, NOPE + VALUE))
        if config["q_lora_rank"]:
            low = norm(
                u @ p["self_attn.q_a_proj.weight"].T, p["self_attn.q_a_layernorm.weight"], 1e-6
            )
            q = low @ p["self_attn.q_b_proj.weight"].T
        else:
            q = u @ p["self_attn.q_proj.weight"].T
        q = q.unflatten(1, (HEADS, NOPE + ROPE)).transpose(0, 1)
        queries = torch.cat((q[..., :NOPE], turned(q[..., NOPE:], positions[-BLOCK:], config)), -1)
        keys = torch.cat((both[..., :NOPE].transpose(0, 1), key.expand(HEADS, -1, -1)), dim=-1)
        weights = (queries @ keys.transpose(1, 2) * scale).softmax(-1)
        found = (weights @ both[..., NOPE:].transpose(0, 1)).transpose(0, 1).flatten(1)
        h = h + found @ p["self_attn.o_proj.weight"].T
        u = norm(h, p["post_attention_layernorm.weight"])
        gate = u @ p["mlp.gate_proj.weight"].T
        up = u @ p["mlp.up_proj.weight"].T
        h = h + (gate * gate.sigmoid() * up) @ p["mlp.down_proj.weight"].T
    return norm(h, w["norm.weight"])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    write_model(directory, "deepseek_v2", **LATENT | {"first_k_dense_replace": 4})
    return directory


def options(kernels: str = "torch", **changes: Any) -> DFlashOptions:
    return DFlashOptions(page_count=64, weight_dtype=torch.float32, kernels=kernels, **changes)


def fill(model: DFlashModel, taps: Tensor, cuts: tuple[int, ...]) -> Block:
    table, start = model.pool.allocate(0), 0
    for end in (*cuts, len(taps)):
        model.write_context(table, start, taps[start:end])
        start = end
    return Block(table, anchor=7, start=len(taps))


@pytest.mark.parametrize("kernels", KERNELS)
def test_block_logits_follow_the_equations(tmp_path: Path, target: Path, kernels: str) -> None:
    state = write_draft(tmp_path, DFLASH)
    model = load_dflash(tmp_path, str(target), options(kernels)).model
    assert (model.attention.chosen, model.attention.kv_bytes_per_token) == ("TORCH_MLA", 2 * 128)
    tables = load_file(target / "model.safetensors")
    embedding, head = tables["model.embed_tokens.weight"], tables["lm_head.weight"]
    contexts = [
        torch.randn(n, 2 * HIDDEN, generator=torch.Generator().manual_seed(n)) for n in (21, 1)
    ]
    blocks = [fill(model, contexts[0], (3, 17)), fill(model, contexts[1], ())]
    logits = model.propose_logits(blocks)
    for own, taps in zip(logits, contexts, strict=True):
        states = block_states(state, DFLASH, taps, embedding, 7)
        expected = states[1:] @ head.double().T
        torch.testing.assert_close(own.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kv_dtype", ["float32", "fp8"])
def test_a_dspark_draft_beside_a_latent_target(tmp_path: Path, target: Path, kv_dtype: str) -> None:
    """Queries through a rank, pairs side by side, YaRN's sharper softmax, and the Markov head; in
    the fp8 layout, whose bytes a token differ, about the same."""
    state = write_draft(tmp_path, DSPARK)
    model = load_dspark(tmp_path, str(target), options(kv_dtype=kv_dtype)).model
    assert isinstance(model, DSparkModel)
    bytes_per_token = 2 * (4 * (RANK + ROPE) if kv_dtype == "float32" else RANK + 4 + 2 * ROPE)
    assert model.attention.kv_bytes_per_token == bytes_per_token
    tables = load_file(target / "model.safetensors")
    embedding, head = tables["model.embed_tokens.weight"], tables["lm_head.weight"].double()
    taps = torch.randn(33, 2 * HIDDEN, generator=torch.Generator().manual_seed(1))
    found = model.propose([fill(model, taps, (16,))], lambda _slot, logits: logits.argmax(-1))
    states = block_states(state, DSPARK, taps, embedding, 7)
    w1, w2 = (state[f"markov_head.markov_{n}.weight"].double() for n in ("w1", "w2"))
    previous = [7, *found.tokens[0, :-1].tolist()]
    expected = states @ head.T + w1[previous] @ w2.T
    if kv_dtype == "float32":
        torch.testing.assert_close(found.logits[0].double(), expected, atol=1e-4, rtol=1e-4)
        assert found.tokens[0].tolist() == expected.argmax(-1).tolist()
    else:
        error = (found.logits[0].double() - expected).norm() / expected.norm()
        assert 1e-5 < error < 0.1, float(error)


def test_rejected_context_leaves_nothing_behind(tmp_path: Path, target: Path) -> None:
    """AB-14: rows written again from an earlier position give what a fresh session gives."""
    write_draft(tmp_path, DFLASH)
    model = load_dflash(tmp_path, str(target), options()).model
    taps, wrong = torch.randn(2, 30, 2 * HIDDEN)
    block = fill(model, torch.cat((taps[:12], wrong)), (12,))
    model.propose_logits([block])
    model.write_context(block.table, 12, taps[12:])
    again = model.propose_logits([Block(block.table, 7, 30)])
    assert torch.equal(again, model.propose_logits([fill(model, taps, (12,))]))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rope_interleave": None}, "rope_interleave .* no default"),
        ({"is_neox_style": False}, "conflicting RoPE styles"),
        ({"v_head_dim": None}, "v_head_dim"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"q_lora_rank": Q_RANK}, "q_a_proj"),
        ({"kv_lora_rank": RANK + 1}, r"kv_a_proj_with_mqa|kv_b_proj"),
    ],
)
def test_loader_refuses(tmp_path: Path, target: Path, change: dict[str, Any], named: str) -> None:
    write_draft(tmp_path, DFLASH)
    (tmp_path / "config.json").write_text(json.dumps(DFLASH | change))
    with pytest.raises(CheckpointError, match=named):
        load_dflash(tmp_path, str(target), options())
