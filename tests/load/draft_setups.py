"""Part of `bench_gpu_draft`: the drafts that it checks, shipped, random and small, and their
targets."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draft_svc.loading import DEFAULT_DRAFT, DEFAULT_DSPARK
from draft_svc.methods.dflash import DFlashMethod
from draft_svc.methods.dspark import DSparkMethod
from engine.errors import CheckpointError
from engine.models.draft_loading import DraftTarget, load_draft
from engine.models.draft_options import DFlashOptions


@dataclass(frozen=True)
class Setup:
    """A draft's checkpoint and its target's, and where they run. `reference` is the backend of the
    same kind of attention in torch."""

    name: str
    method: str
    draft: Path
    target: str
    device: torch.device
    pages: int
    attention: str = "TRITON_ATTN"
    reference: str = "TORCH_SDPA"
    kv_dtype: str = "auto"

    def load(self, **options: Any) -> DFlashMethod:
        chosen: dict[str, Any] = {"kernels": "triton", "attention_backend": self.attention}
        chosen |= {"device": self.device, "page_count": self.pages, "kv_dtype": self.kv_dtype}
        wanted = DFlashOptions(**chosen | options)
        target = DraftTarget(self.target, wanted.weight_dtype)
        kind = DSparkMethod if self.method == "dspark" else DFlashMethod
        return kind(
            load_draft(self.draft, target, wanted, self.method),
            max_draft_tokens=64,
            max_length=None,
            tokenizer_hash="",
            confidences=True,
        )


def random_target(directory: Path, shape: dict[str, Any]) -> None:
    """As much of a Llama as a draft reads."""
    directory.mkdir()
    hidden, vocab = shape["hidden_size"], shape["vocab_size"]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": shape["intermediate_size"], "vocab_size": vocab,
        "num_hidden_layers": shape["num_target_layers"], "num_attention_heads": 9,
        "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
        "max_position_embeddings": 8192, "tie_word_embeddings": True, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 2, "hidden_act": "silu",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    embedding = torch.randn(vocab, hidden) / hidden**0.5
    save_file({"model.embed_tokens.weight": embedding.bfloat16()}, directory / "model.safetensors")


def random_draft(shipped: Path, directory: Path) -> None:
    """The shape of a shipped draft."""
    directory.mkdir()
    state = load_file(shipped / "model.safetensors")
    for name, tensor in state.items():
        fresh = torch.randn(tensor.shape) / tensor.shape[-1] ** 0.5
        state[name] = (fresh if tensor.dim() > 1 else 1 + fresh).to(tensor.dtype)
    save_file(state, directory / "model.safetensors")
    (directory / "config.json").write_text((shipped / "config.json").read_text())


def real_setups(folder: Path, target: str) -> list[Setup]:
    device = torch.device("cuda", 0)
    torch.manual_seed(3)
    shape = json.loads((DEFAULT_DRAFT / "config.json").read_text())
    random_target(folder / "target", shape)
    found = []
    for method, shipped in (("dflash", DEFAULT_DRAFT), ("dspark", DEFAULT_DSPARK)):
        random_draft(shipped, folder / method)
        own = folder / method, str(folder / "target"), device, 8192
        found.append(Setup(f"random {method}", method, *own))
        try:
            DraftTarget(target)
            own = shipped, target, device, 8192
        except CheckpointError as error:
            print(f"random embedding: {error}")
            own = shipped, str(folder / "target"), device, 8192
        found.append(Setup(f"shipped {method}", method, *own))
    return found


def tiny_setups(folder: Path) -> list[Setup]:
    from tests.engine.test_dialects import CASES
    from tests.engine.tiny import write_llama

    write_llama(folder / "target")
    cases = {"zlab": "dflash", "deepspec": "dspark"}
    for name in cases:
        CASES[name].write(folder / name, folder / "target")
    place = str(folder / "target"), torch.device("cpu"), 64
    return [Setup(name, method, folder / name, *place) for name, method in cases.items()]
