"""Random checkpoints of block drafts in every layout, and what they mean: a forward in fp64 from
the equations, one block and one slot at a time, with each convention a value that a test may turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.tiny import HIDDEN, LAYERS, VOCAB

HEADS, KV_HEADS, DIM, INNER, BLOCK, MASK, DRAFT_LAYERS = 4, 2, 24, 80, 5, 9, 3
THETA, EPS, RANK, WINDOW, TRIMMED = 700.0, 1e-5, 6, 6, 40
S, F = "sliding_attention", "full_attention"
State = dict[str, Tensor]
Config = dict[str, Any]
# (causal, window) of every layer; the window counts the token itself
Modes = tuple[tuple[bool, int | None], ...]


@dataclass(frozen=True)
class Meaning:
    """What a checkpoint says, as its publisher means it.

    entered     taps by the layer that the state enters: 0 the embedding, 4 after the last layer
    first       slot whose state predicts the token after the anchor
    mask        what masked slots are made of [hidden]
    target_ids  the target's token of each row of the head
    """

    entered: tuple[int, ...]
    first: int
    modes: Modes
    mask: Tensor
    embedding: Tensor
    head: Tensor
    target_ids: Tensor
    theta: float = THETA
    interleaved: bool = False
    stretch: float = 1.0
    markov: str = ""
    confidence: str = ""


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(x: Tensor, positions: Tensor, m: Meaning) -> Tensor:
    """Rotation of x [heads, n, DIM]: value pairs as complex numbers."""
    angles = positions[:, None] / m.stretch * m.theta ** (-torch.arange(DIM // 2) / (DIM // 2))
    if m.interleaved:
        real, imaginary = x[..., 0::2], x[..., 1::2]
    else:
        real, imaginary = x[..., : DIM // 2], x[..., DIM // 2 :]
    spun = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)
    if m.interleaved:
        return torch.stack((spun.real, spun.imag), -1).flatten(-2)
    return torch.cat((spun.real, spun.imag), -1)


def unseen(start: int, mode: tuple[bool, int | None]) -> Tensor:
    """[BLOCK, start + BLOCK]: the keys that a slot does not see."""
    causal, window = mode
    distance = start + torch.arange(BLOCK)[:, None] - torch.arange(start + BLOCK)
    hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
    return hidden if window is None else hidden | (distance.abs() >= window)


def block_states(state: State, m: Meaning, entering: list[Tensor], anchor: int) -> Tensor:
    """Final states [BLOCK, HIDDEN] of a block whose context is every row of `entering`, the
    target's residual stream [n, HIDDEN] before each of its layers and behind the last."""
    w = {name: tensor.double() for name, tensor in state.items() if tensor.is_floating_point()}
    taps = torch.cat([entering[i].double() for i in m.entered], -1)
    start = len(taps)
    context = norm(taps @ w["fc.weight"].T, w["hidden_norm.weight"])
    masked = m.mask.double().expand(BLOCK - 1, -1)
    h = torch.cat((m.embedding.double()[[anchor]], masked))
    positions = torch.arange(start + BLOCK).double()
    for i, mode in enumerate(m.modes):
        layer = {n.removeprefix(f"layers.{i}."): t for n, t in w.items()}

        def heads(x: Tensor, name: str, layer: State = layer) -> Tensor:
            return (x @ layer[f"self_attn.{name}_proj.weight"].T).unflatten(1, (-1, DIM))

        u = norm(h, layer["input_layernorm.weight"])
        both = torch.cat((context, u))
        q = norm(heads(u, "q"), layer["self_attn.q_norm.weight"]).transpose(0, 1)
        k = norm(heads(both, "k"), layer["self_attn.k_norm.weight"]).transpose(0, 1)
        v = heads(both, "v").transpose(0, 1)
        q, k = turned(q, positions[start:], m), turned(k, positions, m)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (k, v))
        scores = (q @ k.transpose(1, 2) / DIM**0.5).masked_fill(unseen(start, mode), -torch.inf)
        h = h + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ (
            layer["self_attn.o_proj.weight"].T
        )
        u = norm(h, layer["post_attention_layernorm.weight"])
        gate = u @ layer["mlp.gate_proj.weight"].T
        up = u @ layer["mlp.up_proj.weight"].T
        h = h + (gate * gate.sigmoid() * up) @ layer["mlp.down_proj.weight"].T
    return norm(h, w["norm.weight"])


def wide(logits: Tensor, m: Meaning) -> Tensor:
    """Over the target's vocabulary."""
    full = torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
    full[m.target_ids] = logits
    return full


def block_logits(state: State, m: Meaning, entering: list[Tensor], anchor: int) -> Tensor:
    """Logits [proposals, VOCAB] without a Markov head."""
    states = block_states(state, m, entering, anchor)[m.first :]
    return torch.stack([wide(m.head.double() @ h, m) for h in states])


@dataclass(frozen=True)
class Walked:
    tokens: list[int]
    logits: Tensor
    confidences: list[float]


def walk(
    state: State,
    m: Meaning,
    entering: list[Tensor],
    anchor: int,
    choose: Callable[[int, Tensor], int],
) -> Walked:
    """Left to right: `choose(slot, logits [VOCAB])` is the token that the next slot follows."""
    w = {name: tensor.double() for name, tensor in state.items() if tensor.is_floating_point()}
    previous, s = anchor, torch.zeros(RANK, dtype=torch.float64)
    tokens, logits, confidences = [], [], []
    for slot, h in enumerate(block_states(state, m, entering, anchor)[m.first :]):
        row = w["markov_head.markov_w1.weight"][previous]
        z = row
        if m.markov == "gated":
            weight, bias = (w[f"markov_head.gate_proj.{n}"] for n in ("weight", "bias"))
            z = row / (1 + (-(weight @ torch.cat((h, row)) + bias)).exp())
        elif m.markov == "rnn":
            weight, bias = (w[f"markov_head.joint_proj.{n}"] for n in ("weight", "bias"))
            joint = weight @ torch.cat((s, row, h)) + bias
            forget = 1 / (1 + (-joint[:RANK]).exp())
            s = forget * s + (1 - forget) * joint[RANK : 2 * RANK].tanh()
            z = joint[2 * RANK :].tanh()
        logits.append(wide(m.head.double() @ h + w["markov_head.markov_w2.weight"] @ z, m))
        if m.confidence:
            features = torch.cat((h, row)) if m.confidence == "with_markov" else h
            certain = w["confidence_head.proj.weight"][0] @ features
            certain = certain + w["confidence_head.proj.bias"][0]
            confidences.append(float(1 / (1 + (-certain).exp())))
        previous = choose(slot, logits[-1])
        tokens.append(previous)
    return Walked(tokens, torch.stack(logits), confidences)


# -- checkpoints ---------------------------------------------------------------------------------

BODY: Config = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": DRAFT_LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "rms_norm_eps": EPS,
    "max_position_embeddings": 256,
    "vocab_size": VOCAB,
}
ZLAB: Config = BODY | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": BLOCK,
    "rope_theta": THETA,
    "num_target_layers": LAYERS,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
}
DEEPSPEC: Config = BODY | {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "block_size": BLOCK,
    "rope_theta": THETA,
    "rope_scaling": None,
    "num_target_layers": LAYERS,
    "mask_token_id": MASK,
    "target_layer_ids": [0, 2],
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "sample_from_anchor": True,
    "tie_word_embeddings": False,
}
SPECULATORS: Config = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.6.0",
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}],
        "verifier": {"name_or_path": "any/model", "architectures": ["LlamaForCausalLM"]},
    },
    "transformer_layer_config": BODY
    | {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": THETA}},
    "aux_hidden_state_layer_ids": [1, 3],
    "block_size": BLOCK,
    "draft_vocab_size": TRIMMED,
    "mask_token_id": MASK,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "target_hidden_size": None,
}
SPECULATORS_DSPARK: Config = SPECULATORS | {
    "architectures": ["DSparkSpeculator"],
    "speculators_model_type": "dspark",
    "speculators_config": SPECULATORS["speculators_config"] | {"algorithm": "dspark"},
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": False,
    "sample_from_anchor": True,
}


def body_tensors(taps: int = 2) -> State:
    width = taps * HIDDEN
    state = {
        "fc.weight": torch.randn(HIDDEN, width) / width**0.5,
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
    for i in range(DRAFT_LAYERS):
        for name, shape in shapes.items():
            state[f"layers.{i}.{name}.weight"] = torch.randn(shape) / shape[1] ** 0.5
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"layers.{i}.{name}.weight"] = torch.rand(HIDDEN) + 0.5
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            state[f"layers.{i}.{name}.weight"] = 2 * torch.rand(DIM) + 0.5
    return state


def own_tables(rows: int = VOCAB) -> State:
    """Embedding and head of the draft's own, unlike the target's."""
    return {
        "embed_tokens.weight": torch.randn(VOCAB, HIDDEN) * 0.2,
        "lm_head.weight": torch.randn(rows, HIDDEN) * 0.2,
    }


def map_tensors(ids: Tensor) -> State:
    """The map of a trimmed head, as offsets, and its reverse as flags."""
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": known}


def markov_tensors(kind: str, with_markov: bool | None, rows: int = VOCAB) -> State:
    """Strong enough that every draw depends on the token before it. `with_markov` None: there is no
    confidence head."""
    state = {
        "markov_head.markov_w1.weight": torch.randn(VOCAB, RANK),
        "markov_head.markov_w2.weight": 2 * torch.randn(rows, RANK),
    }
    if kind == "gated":
        state["markov_head.gate_proj.weight"] = torch.randn(RANK, HIDDEN + RANK) / HIDDEN**0.5
        state["markov_head.gate_proj.bias"] = torch.randn(RANK)
    elif kind == "rnn":
        shape = (3 * RANK, 2 * RANK + HIDDEN)
        state["markov_head.joint_proj.weight"] = torch.randn(shape) * 2 / HIDDEN**0.5
        state["markov_head.joint_proj.bias"] = torch.randn(3 * RANK)
    if with_markov is not None:
        width = HIDDEN + (RANK if with_markov else 0)
        state["confidence_head.proj.weight"] = torch.randn(1, width) / HIDDEN**0.5
        state["confidence_head.proj.bias"] = torch.randn(1)
    return state


def write(directory: Path, config: Config, state: State) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(state, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def target_tables(target: Path) -> tuple[Tensor, Tensor]:
    weights = load_file(target / "model.safetensors")
    return weights["model.embed_tokens.weight"], weights["lm_head.weight"]


def scattered_ids(seed: int = 3) -> Tensor:
    """TRIMMED distinct ids, in increasing order as trainers write them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(VOCAB, generator=generator)[:TRIMMED].sort().values


def entering(count: int, seed: int = 0) -> list[Tensor]:
    """Rows [count, HIDDEN] before each layer of a target and behind the last, all different."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, HIDDEN, generator=generator) for _ in range(LAYERS + 1)]
