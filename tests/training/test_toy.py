"""The newcomer's way: a made-up language, a tiny Qwen3 that speaks it, its draft; prompts."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from draft_svc.training.chat import load_chat
from draft_svc.training.cli import build_parser, main
from draft_svc.training.net import load_target
from draft_svc.training.prompts import KINDS, around, opening
from draft_svc.training.toy import Language, ToyOptions, _logits, _parameters, fit_target, run_toy
from engine.models.config import from_hf
from engine.models.rope import rope_tables
from engine.weights import read_json
from tests.engine.tiny import load_tiny, run


def test_the_language_has_second_order_and_its_entropy() -> None:
    language = Language(3)
    ids = language.sample(400, 80)
    triples = Counter(zip(*(ids[:, i : i + 78].flatten().tolist() for i in range(3)), strict=True))
    pairs: dict[tuple[int, int], list[int]] = {}
    for (a, b, _), count in triples.items():
        pairs.setdefault((a, b), []).append(count)
    assert all(len(counts) <= 3 for counts in pairs.values())
    total = sum(triples.values())
    entropy = -sum(n / total * math.log(n / sum(c)) for c in pairs.values() for n in c)
    assert abs(entropy - language.entropy) < 0.05


def test_what_is_fitted_is_what_is_served(tmp_path: Path) -> None:
    """The checkpoint of an unfitted target gives the fitting forward's logits in the engine."""
    fit_target(tmp_path, Language(0), 0.0, 7, print)
    c = from_hf(read_json(tmp_path / "config.json"))
    ids = Language(1).sample(1, 20)
    with torch.no_grad():
        wanted = _logits(_parameters(c, 7), c, ids, rope_tables(c.rope, c.head_dim, 64))[0]
        net = load_target(tmp_path, torch.device("cpu"), torch.float32)
        states, _ = net.forward(ids[0], net.causal(1, 20))
    torch.testing.assert_close(net.logits(states), wanted, rtol=1e-4, atol=1e-4)
    engine = load_tiny(tmp_path)
    logits, _ = run(engine, [(engine.allocate(32), ids[0].tolist(), 0)])
    torch.testing.assert_close(logits[0], wanted, rtol=1e-4, atol=1e-4)
    chat = load_chat(tmp_path)
    assert chat.user("w0 w3") == [5, 8] and chat.decode([5, 8]) == "w0 w3"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_whole_way_beats_lookup(tmp_path: Path) -> None:
    """Target, data, draft, real loop at T = 1 against n-gram lookup on the same texts."""
    report = run_toy(tmp_path, ToyOptions())
    assert report.temperature == 1.0 and report.prompts == 24
    assert report.tau > report.ngram_tau + 0.3
    for name in ("config.json", "model.safetensors", "README.md", "training.json"):
        assert (tmp_path / "draft" / name).is_file()


def test_openings_cover_every_kind_and_vary() -> None:
    rng = random.Random(0)
    made = [opening(rng) for _ in range(3000)]
    assert {o.kind for o in made} == set(KINDS) - {"passage", "ask", "file"}
    assert len({o.text for o in made}) > 700
    assert all(o.text or o.kind == "chat" for o in made)
    kinds = {around(rng, "Some text.").kind for _ in range(50)}
    assert kinds == {"passage", "ask"}
    assert all("Some text." in around(rng, "Some text.").text for _ in range(50))


def test_wrong_calls_end_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_target(tmp_path / "t", Language(0), 0.0, 0, print)
    target = str(tmp_path / "t")
    (tmp_path / "data").mkdir()
    data, out = str(tmp_path / "data"), str(tmp_path / "run")
    train = ["train", "--target", target, "--data", data, "--out", out, "--draft"]
    assert main([*train, "dflash,mask=2"]) == 2
    assert "mask = 2" in capsys.readouterr().err
    assert main([*train, "dflash,mask=3"]) == 2
    assert "manifest.json" in capsys.readouterr().err
    assert main([*train, "dflash,mask=3", "--loss", "ce=high"]) == 2
    assert "ce=high" in capsys.readouterr().err
    assert main(["generate", "--target", target, "--out", data, "--prompts-only"]) == 2
    assert "--prompts" in capsys.readouterr().err
    assert build_parser().parse_args(["toy", "--out", "x"]).method == "dspark"
