"""`specwire bench` over every kind of drafter on a tiny random pair: turns of a chat, both
temperatures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from coordinator.bench import compare
from coordinator.bench_modes import parse_modes
from coordinator.bench_prompts import load_prompts
from coordinator.bench_run import BenchOptions
from coordinator.local import LocalDeployment, LocalOptions, parse_extra
from tests.engine.tiny import VOCAB, write_llama

TEMPLATE = "{% for m in messages %}w1 {{ m.content }} w2 {% endfor %}"
MODES = "plain,draft,ngram,hybrid,draft_model"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDeployment]:
    """The draft model has the target's weights, so that its proposals are worth something."""
    folder = tmp_path_factory.mktemp("pair")
    write_llama(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    settings = [
        "draft.methods=ngram,hybrid,draft_model",
        f"draft.draft-model={folder}",
        "draft.hybrid-neural=draft_model",
        "coordinator.proposal-wait-min-ms=2000",
    ]
    with LocalDeployment(LocalOptions(model=str(folder), extra=parse_extra(settings))) as running:
        yield running


def turns(path: Path, count: int) -> Path:
    """A chat that grows: each line begins with all of the line before."""
    messages: list[dict[str, str]] = []
    lines = []
    for turn in range(count):
        said = " ".join(f"w{(7 * turn + i) % 80 + 10}" for i in range(30))
        messages.append({"role": "user", "content": said})
        lines.append(json.dumps({"messages": messages, "category": f"turn {turn + 1}"}))
        messages.append({"role": "assistant", "content": f"w{turn + 3} w4 w5"})
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_every_drafter_over_the_turns_of_a_chat(
    pair: LocalDeployment, tmp_path: Path, temperature: float
) -> None:
    file = turns(tmp_path / "turns.jsonl", 3)
    options = BenchOptions(max_tokens=24, temperature=temperature, seed=3)
    modes = parse_modes(MODES, "exact")
    report = await compare(pair.address, file, load_prompts(file), modes, options)
    environment: Any = report["environment"]
    assert environment["num_speculative_tokens"] == "adaptive"
    assert environment["default_method"] == "draft_model"
    for label, entry in report["modes"].items():
        assert entry["identical"] == entry["prompts"] == 3, (label, entry["divergences"])
        assert set(entry["by_category"]) == {"turn 1", "turn 2", "turn 3"}
    assert report["modes"]["plain"]["tau"] == 1.0
    if not temperature:
        # A draft as dear as its target does not pay: the first sessions try it, those that come
        # later know.
        assert report["modes"]["draft"]["tau"] > 1.0
