"""Turns a GGUF file of architecture `llama` into a checkpoint directory, once, in the cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.cache_dir import cache_lock, cache_root
from engine.errors import CheckpointError
from engine.models.config import refuse
from engine.tokenizer import TOKENIZER_FILE, document_from_gguf

_FORMAT = 1  # raise it when what is written below changes
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(path: Path) -> Path:
    """The checkpoint directory of a GGUF file: config, weights and tokenizer document."""
    stat = path.stat()
    text = f"{_FORMAT}|{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    target = cache_root() / "gguf" / hashlib.sha256(text.encode()).hexdigest()[:24]
    if target.is_dir():
        return target
    with cache_lock(f"gguf/{target.name}"):
        if not target.is_dir():
            temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
            temporary.mkdir(parents=True)
            try:
                _write(path, temporary)
                temporary.rename(target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return target


def _write(path: Path, directory: Path) -> None:
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"GGUF file {path.name} cannot be read: {error}") from None
    fields = {name: field.contents() for name, field in reader.fields.items()}
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        state[hf_name(tensor.name)] = unpermute(tensor.name, values, fields).to(torch.bfloat16)
    config = hf_config(fields, tied="lm_head.weight" not in state)
    (directory / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
    (directory / TOKENIZER_FILE).write_bytes(document_from_gguf(fields))
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def hf_name(name: str) -> str:
    """GGUF tensor name -> Hugging Face name."""
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[3] == "weight" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.weight"
    raise CheckpointError(f"GGUF tensor {name} is not part of a llama model")


def unpermute(name: str, values: Tensor, fields: Mapping[str, Any]) -> Tensor:
    """GGUF stores the Q and K rows of arch llama pair by pair; half-split RoPE wants both halves
    apart.
    """
    if name.endswith("attn_q.weight"):
        heads = int(fields["llama.attention.head_count"])
    elif name.endswith("attn_k.weight"):
        heads = int(fields["llama.attention.head_count_kv"])
    else:
        return values
    rows, columns = values.shape
    return values.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def hf_config(fields: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise refuse("general.architecture", architecture, "llama")
    if any(name.startswith("llama.rope.scaling") for name in fields):
        raise refuse("llama.rope.scaling", "present", "no scaling")
    try:
        hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": fields["llama.feed_forward_length"],
            "num_hidden_layers": fields["llama.block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
            "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
            # Stored in single precision: 1e-5 would come back as 9.999999747e-06.
            "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
            "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
            "max_position_embeddings": fields["llama.context_length"],
            "vocab_size": len(fields["tokenizer.ggml.tokens"]),
            "tie_word_embeddings": tied,
            "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
            "torch_dtype": "bfloat16",
            "name": fields.get("general.name", ""),
        }
    except KeyError as error:
        raise CheckpointError(f"GGUF metadata has no {error.args[0]}") from None
