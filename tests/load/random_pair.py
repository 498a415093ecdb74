"""A random target of a known shape and random block drafts for it: for times, which do not depend
on what weights hold.

python -m tests.load.random_pair --shape qwen3-8b --out DIR    DIR/target, DIR/dflash, DIR/dspark
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from draft_svc.training.export import config_of
from draft_svc.training.spec import parse_spec, shapes
from engine.models.config import from_hf
from engine.weights import read_json

SHAPES = {
    "tiny": (
        "qwen3",
        {
            "vocab_size": 96, "hidden_size": 64, "intermediate_size": 112,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "tie_word_embeddings": True, "rope_theta": 10000.0,
        },
    ),
    "smollm2-135m": (
        "llama",
        {
            "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
            "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
            "tie_word_embeddings": True, "rope_theta": 100000.0,
        },
    ),
    "qwen3-8b": (
        "qwen3",
        {
            "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "tie_word_embeddings": False, "rope_theta": 1000000.0,
        },
    ),
}  # fmt: skip
# Layers of a draft of that target; DSpark's rank is the default one.
DRAFT_LAYERS = {"tiny": 1, "smollm2-135m": 2, "qwen3-8b": 5}
MASK = 16


def write_target(directory: Path, shape: str, device: str = "cpu") -> None:
    """In bf16, with a tokenizer of one word a token, so that the services can serve it."""
    family, options = SHAPES[shape]
    config = AutoConfig.for_model(
        family, max_position_embeddings=8192, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        **options,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(config)
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(directory, max_shard_size="8GB")
    vocab = {f"w{i}": i for i in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    del model
    if device != "cpu":
        torch.cuda.empty_cache()


def write_draft(directory: Path, target: Path, method: str, layers: int) -> None:
    """In the layout that `specwire train-draft` exports."""
    described = from_hf(read_json(target / "config.json"))
    spec = parse_spec(f"{method},layers={layers},mask={MASK}", described)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config_of(spec, described), indent=1))
    torch.manual_seed(1)
    weights = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if "norm" in name
        else torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)
        for name, shape in shapes(spec, described).items()
    }
    save_file(weights, directory / "model.safetensors")


def write_pair(directory: Path, shape: str, device: str = "cpu") -> None:
    write_target(directory / "target", shape, device)
    for method in ("dflash", "dspark"):
        write_draft(directory / method, directory / "target", method, DRAFT_LAYERS[shape])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    write_pair(asked.out, asked.shape, asked.device)


if __name__ == "__main__":
    main()
