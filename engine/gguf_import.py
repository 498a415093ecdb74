"""Turns a GGUF file into a checkpoint directory, once, in the cache."""

from __future__ import annotations

import hashlib
import json
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
from engine.models.config import FAMILIES
from engine.models.fields import refuse
from engine.tokenizer import TOKENIZER_FILE, document_from_gguf
from engine.weights import cause

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # GGUF gives Mistral as llama
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
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
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
            # Of a process that ended within its conversion: under the lock nobody else is in one.
            for left in target.parent.glob(f"{target.name}*.tmp"):
                shutil.rmtree(left)
            temporary = target.with_name(f"{target.name}.tmp")
            temporary.mkdir()
            try:
                _write(path, temporary)
                temporary.rename(target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return target


def _write(path: Path, directory: Path) -> None:
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise CheckpointError(f"GGUF file {path.name} cannot be read: {cause(error)}") from None
    architecture = str(fields.get("general.architecture"))
    names = {tensor.name: hf_name(tensor.name, architecture) for tensor in reader.tensors}
    try:
        config = hf_config(fields, tied="lm_head.weight" not in names.values())
        document = document_from_gguf(fields)
    except KeyError as error:
        raise CheckpointError(f"GGUF metadata has no {error.args[0]}") from None
    except (TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise CheckpointError(f"GGUF metadata is malformed: {error}") from None
    state = {}
    for tensor in reader.tensors:
        values = unpermute(tensor.name, _plain(tensor), fields)
        state[names[tensor.name]] = values.to(torch.bfloat16)
    (directory / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))
    (directory / TOKENIZER_FILE).write_bytes(document)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})


def _plain(tensor: Any) -> Tensor:
    """The values of a tensor, of any type that the gguf package can turn into fp32."""
    try:
        plain = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        kind = tensor.tensor_type.name
        raise CheckpointError(
            f"GGUF tensor {tensor.name} has type {kind}; accepted: the gguf package's own types"
        ) from None
    return torch.from_numpy(plain.copy())


def hf_name(name: str, architecture: str = "llama") -> str:
    """GGUF tensor name -> Hugging Face name."""
    _check(architecture)
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    kinds = ("weight", "bias") if architecture == "qwen2" else ("weight",)
    if len(parts) == 4 and parts[0] == "blk" and parts[3] in kinds and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    raise CheckpointError(f"GGUF tensor {name} is not part of a {architecture} model")


def _check(architecture: object) -> None:
    if architecture not in ARCHITECTURES:
        raise refuse("general.architecture", architecture, ", ".join(ARCHITECTURES))


def unpermute(name: str, values: Tensor, fields: Mapping[str, Any]) -> Tensor:
    """GGUF stores the Q and K rows of arch llama, and of no other, pair by pair; half-split RoPE
    wants both halves apart.
    """
    if fields["general.architecture"] != "llama":
        return values
    heads = int(fields["llama.attention.head_count"])
    if name.endswith("attn_k.weight"):
        heads = int(fields.get("llama.attention.head_count_kv", heads))
    elif not name.endswith("attn_q.weight"):
        return values
    rows, columns = values.shape
    return values.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _refuse_unsupported(architecture: str, own: Mapping[str, Any]) -> None:
    """`own` holds the keys of the architecture without its prefix."""
    key_length = own.get("attention.key_length")
    plain: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("rope.scaling.type", (None, "none")),
        ("rope.scaling.factor", (None, 0.0, 1.0)),
        ("expert_count", (None, 0)),
        ("attention.sliding_window", (None, 0)),
        ("attention.value_length", (None, key_length)),
        ("rope.dimension_count", (None, key_length or own.get("rope.dimension_count"))),
    )
    for key, accepted in plain:
        if own.get(key) not in accepted:
            raise refuse(f"{architecture}.{key}", own[key], f"{accepted[-1]}, or absent")


def hf_config(fields: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """config.json for the metadata of a GGUF file. KeyError: something is not there."""
    architecture = fields.get("general.architecture")
    _check(architecture)
    own = {
        name.removeprefix(f"{architecture}."): value
        for name, value in fields.items()
        if name.startswith(f"{architecture}.")
    }
    _refuse_unsupported(str(architecture), own)
    hidden, heads = own["embedding_length"], own["attention.head_count"]
    rotated = own.get("rope.dimension_count", hidden // heads)
    return {
        "architectures": [FAMILIES[str(architecture)].architecture],
        "model_type": architecture,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": own.get("attention.key_length", rotated),
        # Stored in single precision: 1e-5 would come back as 9.999999747e-06.
        "rms_norm_eps": float(f"{own['attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(own.get("rope.freq_base", 10000.0)),
        "max_position_embeddings": own["context_length"],
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
        "name": fields.get("general.name", ""),
    }
