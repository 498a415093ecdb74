"""`toy`: the whole way in under two minutes on a CPU, with nothing to download.

A random target cannot be drafted for, so a tiny Qwen3 is first fitted to a made-up language in
which every token depends on the two before it. Then data, a draft, and both drafters' tau at T = 1.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F

from draft_svc.training.batches import BatchOptions
from draft_svc.training.chat import load_chat
from draft_svc.training.evaluate import EvalPrompt, SetReport, evaluate, table
from draft_svc.training.export import export
from draft_svc.training.generate import GenerateOptions, generate, weights_sha256
from draft_svc.training.net import load_target
from draft_svc.training.schedule import TrainOptions
from draft_svc.training.shards import Manifest, load_corpus
from draft_svc.training.spec import parse_spec
from draft_svc.training.trainer import Trainer
from engine.models.config import ModelConfig, from_hf
from engine.models.rope import rope_tables

SPECIAL = ("<pad>", "<bos>", "<eos>", "<mask>", "<unk>")
MASK_ID = 3
_SYMBOLS = 24
_NEXT = (0.75, 0.15, 0.1)  # chances of the three successors of a pair
_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


class Language:
    """Every pair of symbols has three successors with fixed chances."""

    def __init__(self, seed: int) -> None:
        self._draws = torch.Generator().manual_seed(seed)
        order = torch.rand(_SYMBOLS, _SYMBOLS, _SYMBOLS, generator=self._draws).argsort(-1)
        self._successors = order[..., : len(_NEXT)]

    @property
    def entropy(self) -> float:
        """Nats per token: what a perfect model's loss would be."""
        return -sum(p * math.log(p) for p in _NEXT)

    def sample(self, rows: int, length: int) -> Tensor:
        """Token ids int64 [rows, length]."""
        found = torch.randint(_SYMBOLS, (rows, length), generator=self._draws)
        chances = torch.tensor(_NEXT).expand(rows, -1)
        for place in range(2, length):
            which = torch.multinomial(chances, 1, generator=self._draws)
            successors = self._successors[found[:, place - 2], found[:, place - 1]]
            found[:, place] = successors.gather(1, which)[:, 0]
        return found + len(SPECIAL)


def target_config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "vocab_size": len(SPECIAL) + _SYMBOLS,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_sliding_window": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


def _parameters(c: ModelConfig, seed: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    d, q, kv = c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
    inner = c.intermediate_size
    found = {"model.embed_tokens.weight": torch.randn(c.vocab_size, d, generator=draws) * 0.05}
    for i in range(c.layer_count):
        for name, rows, columns in (
            ("self_attn.q_proj", q, d),
            ("self_attn.k_proj", kv, d),
            ("self_attn.v_proj", kv, d),
            ("self_attn.o_proj", d, q),
            ("mlp.gate_proj", inner, d),
            ("mlp.up_proj", inner, d),
            ("mlp.down_proj", d, inner),
        ):
            weight = torch.randn(rows, columns, generator=draws) / columns**0.5
            found[f"model.layers.{i}.{name}.weight"] = weight
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{i}.{name}.weight"] = torch.ones(d)
        for name in ("q_norm", "k_norm"):
            found[f"model.layers.{i}.self_attn.{name}.weight"] = torch.ones(c.head_dim)
    found["model.norm.weight"] = torch.ones(d)
    return {name: tensor.requires_grad_() for name, tensor in found.items()}


def _logits(
    p: dict[str, Tensor], c: ModelConfig, ids: Tensor, tables: tuple[Tensor, Tensor]
) -> Tensor:
    """Qwen3 with gradients; ids [B, L] -> [B, L, V]."""
    batch, length = ids.shape
    cos, sin = (table[:length] for table in tables)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], p[f"{name}.weight"], c.rms_eps)

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    x = p["model.embed_tokens.weight"][ids]
    for i in range(c.layer_count):
        layer = f"model.layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            F.linear(h, p[f"{layer}.self_attn.{n}_proj.weight"])
            .view(batch, length, -1, c.head_dim)
            .transpose(1, 2)
            for n in ("q", "k", "v")
        )
        q = rotate(norm(q, f"{layer}.self_attn.q_norm"))
        k = rotate(norm(k, f"{layer}.self_attn.k_norm"))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y.transpose(1, 2).reshape(batch, length, -1)
        x = x + F.linear(y, p[f"{layer}.self_attn.o_proj.weight"])
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (F.linear(h, p[f"{layer}.mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, p[f"{layer}.mlp.down_proj.weight"])
    return F.linear(norm(x, "model.norm"), p["model.embed_tokens.weight"])


def fit_target(
    directory: Path, language: Language, seconds: float, seed: int, say: Callable[[str], None]
) -> float:
    """Writes a Qwen3 checkpoint that speaks the language; returns its last loss in nats."""
    config = target_config()
    c = from_hf(config)
    p = _parameters(c, seed)
    tables = rope_tables(c.rope, c.head_dim, 64)
    optimizer = torch.optim.AdamW(p.values(), 3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    begun, told, smooth, step = time.monotonic(), 0.0, math.log(_SYMBOLS), 0
    while (used := time.monotonic() - begun) < seconds and smooth > language.entropy + 0.04:
        ids = language.sample(32, 64)
        logits = _logits(p, c, ids[:, :-1], tables)[:, 1:]  # the first two tokens are random
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(p.values(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 30) * (1 - 0.9 * used / seconds)
        optimizer.step()
        smooth, step = 0.97 * smooth + 0.03 * float(loss.detach()), step + 1
        if used - told > 10:
            best = language.entropy
            say(f"target: {used:3.0f} s, loss {smooth:.3f} (the language itself: {best:.3f})")
            told = used
    _write_target(directory, config, {n: t.detach().to(torch.float32) for n, t in p.items()})
    return smooth


def _write_target(directory: Path, config: dict[str, Any], state: dict[str, Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    words = [*SPECIAL, *(f"w{i}" for i in range(_SYMBOLS))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    options = special | {"unk_token": "<unk>", "chat_template": _TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(options, indent=1))


@dataclass(frozen=True, slots=True)
class ToyOptions:
    """Seconds for each part; the whole takes about their sum and ten more."""

    fit_seconds: float = 40.0
    generate_seconds: float = 15.0
    train_seconds: float = 30.0
    method: str = "dspark"
    seed: int = 0


def run_toy(out: Path, options: ToyOptions, say: Callable[[str], None] = print) -> SetReport:
    """Target, data, draft and figures under `out`; returns the draft's figures at T = 1."""
    language = Language(options.seed)
    target = out / "target"
    loss = fit_target(target, language, options.fit_seconds, options.seed, say)
    say(f"target fitted: loss {loss:.3f}, the language itself {language.entropy:.3f} nats a token")
    net, chat = load_target(target, torch.device("cpu"), torch.float32), load_chat(target)
    prompts = out / "prompts.jsonl"
    rows = [{"ids": ids} for ids in language.sample(2048, 8).tolist()]
    prompts.write_text("\n".join(json.dumps(row) for row in rows))
    sha = weights_sha256(target)
    manifest = Manifest(sha, chat.hash, 0.05, options.seed)
    made = GenerateOptions(
        options.generate_seconds / 60, 10**9, 64, 128, 96, 0.0, 1.0, seed=options.seed,
        own_prompts=False,
    )  # fmt: skip
    generate(net, chat, out / "data", manifest, made, prompts, say)
    rank = ",rank=16" if options.method == "dspark" else ""
    text = f"{options.method},name=draft,layers=1,block=5,mask={MASK_ID}{rank}"
    spec = parse_spec(text, net.config)
    batches = BatchOptions(tokens=1024, block_tokens=1280, density=0.33, block=5)
    wanted = TrainOptions(minutes=options.train_seconds / 60, lr=5e-3, batches=batches)
    trainer = Trainer(net, [spec], load_corpus([out / "data"]), wanted, say)
    trainer.measure_scale()
    trainer.run()
    held = load_corpus([out / "data"], "holdout")
    asked = [EvalPrompt("toy", held.prompt(i).tolist()) for i in range(min(24, len(held)))]
    draft = trainer.drafts[0]
    stops = net.config.eos_token_ids
    reports = evaluate(draft, asked, max_new=96, stop_ids=stops, temperature=1.0)
    facts = {"target weights sha256": sha, "seed": options.seed, "steps": trainer.step}
    export(draft, out / "draft", facts, reports)
    say(table(reports))
    return reports[0]
