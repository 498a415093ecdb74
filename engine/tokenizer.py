"""The tokenizer document: what a coordinator needs to turn text into ids and back, as JSON.

{"tokenizer": <tokenizer.json object>, "chat_template": str, "special": {...}}, where special holds
bos_token and eos_token (text, for templates), bos_token_id, eos_token_ids, pad_token_id,
unk_token_id and add_bos_token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.models.fields import refuse, token_ids
from engine.weights import read_json, read_text

TOKENIZER_FILE = "tokenizer_document.json"
_CONTROL = 3  # GGUF token type
_USER_DEFINED = 4
_BYTE_LEVEL = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": {"type": "ByteLevel", **_BYTE_LEVEL},
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", **_BYTE_LEVEL},
        ],
    },
    # How Qwen2 and Qwen3 cut: contractions, words, single digits, signs, line ends, spaces.
    "qwen2": {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {
                    "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                },
                "behavior": "Isolated",
                "invert": False,
            },
            {"type": "ByteLevel", **_BYTE_LEVEL, "use_regex": False},
        ],
    },
}
_NORMALIZERS = {"qwen2": {"type": "NFC"}}


def tokenizer_hash(document: bytes) -> str:
    return hashlib.sha256(document).hexdigest()


def token_table(document: bytes) -> dict[int, str]:
    """The token behind every id, added ones included; empty where the document lists none."""
    tokenizer = json.loads(document)["tokenizer"]
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, dict):
        table = {index: token for token, index in vocabulary.items()}
    else:  # unigram models list (token, score) by id
        table = {index: entry[0] for index, entry in enumerate(vocabulary)}
    return table | {token["id"]: token["content"] for token in tokenizer.get("added_tokens", [])}


def read_document(directory: Path) -> bytes:
    """The document of a checkpoint directory: written at import (GGUF), or built from its files."""
    ready = directory / TOKENIZER_FILE
    return ready.read_bytes() if ready.is_file() else document_from_hf(directory)


def check_vocabulary(document: bytes, vocab_size: int) -> None:
    """Raises CheckpointError when the tokenizer can give ids that the model does not have, or the
    text ends with such an id: a tokenizer of another model. Fewer ids than rows are usual.
    """
    try:
        parsed = json.loads(document)
        tokenizer, ends = parsed["tokenizer"], parsed["special"]["eos_token_ids"]
    except (ValueError, TypeError, KeyError):
        raise CheckpointError(
            f"{TOKENIZER_FILE} is malformed; accepted: what the conversion of a GGUF file writes"
        ) from None
    highest = _highest_id(tokenizer)
    if highest >= vocab_size:
        raise CheckpointError(
            f"the tokenizer does not belong to the model: its highest id is {highest}; "
            f"accepted: ids in [0, {vocab_size}), the model's vocabulary"
        )
    for token in ends:
        if not 0 <= token < vocab_size:
            raise refuse("eos_token_id", token, f"ids in [0, {vocab_size}), the vocabulary")


def _highest_id(tokenizer: Mapping[str, Any]) -> int:
    """-1 without any token. A vocabulary is text -> id, or a list whose order gives the ids."""
    try:
        vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
        listed = isinstance(vocabulary, list)
        known = range(len(vocabulary)) if listed else vocabulary.values()
        added = [entry["id"] for entry in tokenizer.get("added_tokens") or []]
        return max((int(token) for token in (*known, *added)), default=-1)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise CheckpointError(
            "tokenizer.json is malformed; accepted: the format of the tokenizers library"
        ) from None


def document_from_gguf(fields: Mapping[str, Any]) -> bytes:
    """Builds a byte-level BPE tokenizer from GGUF metadata."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise refuse("tokenizer.ggml.model", kind, "gpt2")
    if pre not in _PRE_TOKENIZERS:
        raise refuse("tokenizer.ggml.pre", pre, ", ".join(_PRE_TOKENIZERS))
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]

    def text(key: str) -> str:
        token = fields.get(f"tokenizer.ggml.{key}_token_id")
        return "" if token is None else tokens[token]

    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, tokens[i], types[i]) for i in _specials(types)],
        "normalizer": _NORMALIZERS.get(pre),
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **_BYTE_LEVEL},
        "model": _bpe(tokens, fields["tokenizer.ggml.merges"], text("unknown")),
    }
    special = {
        "bos_token": text("bos"),
        "eos_token": text("eos"),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_ids": list(token_ids(fields.get("tokenizer.ggml.eos_token_id"))),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "unk_token_id": fields.get("tokenizer.ggml.unknown_token_id"),
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
    }
    return _dump(tokenizer, fields.get("tokenizer.chat_template", ""), special)


def _specials(types: list[int]) -> list[int]:
    return [i for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)]


def _added(token_id: int, content: str, kind: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": kind == _CONTROL}


def _bpe(tokens: list[str], merges: list[str], unknown: str) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown or None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [merge.split(" ", 1) for merge in merges],
    }


def document_from_hf(directory: Path) -> bytes:
    """Builds the document from tokenizer.json and its companions."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            "checkpoint has no tokenizer.json; accepted: the format of the tokenizers library"
        )
    tokenizer = read_json(path)
    _highest_id(tokenizer)  # refuses what has another form
    options, model = (
        _optional(directory, "tokenizer_config.json"),
        _optional(directory, "config.json"),
    )
    generation = _optional(directory, "generation_config.json")
    ids = {entry.get("content"): entry["id"] for entry in tokenizer.get("added_tokens") or []}

    def text(key: str) -> str:
        value = options.get(f"{key}_token") or ""
        return str(value.get("content", "") if isinstance(value, dict) else value)

    eos = token_ids(generation.get("eos_token_id", model.get("eos_token_id")))
    special = {
        "bos_token": text("bos"),
        "eos_token": text("eos"),
        "bos_token_id": model.get("bos_token_id", ids.get(text("bos"))),
        "eos_token_ids": list(eos),
        "pad_token_id": model.get("pad_token_id", ids.get(text("pad"))),
        "unk_token_id": ids.get(text("unk")),
        "add_bos_token": bool(options.get("add_bos_token", False)),
    }
    return _dump(tokenizer, _chat_template(directory, options), special)


def _chat_template(directory: Path, options: Mapping[str, Any]) -> str:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    template = options.get("chat_template") or ""
    if isinstance(template, list):  # several named templates
        named = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = named[0].get("template", named) if named else ""
    if not isinstance(template, str):
        raise refuse("chat_template", template, "a template, or a list of named ones")
    return template


def _optional(directory: Path, name: str) -> dict[str, Any]:
    path = directory / name
    value = read_json(path) if path.is_file() else {}
    return value if isinstance(value, dict) else {}


def _dump(tokenizer: object, chat_template: str, special: Mapping[str, Any]) -> bytes:
    document = {"tokenizer": tokenizer, "chat_template": chat_template, "special": dict(special)}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
