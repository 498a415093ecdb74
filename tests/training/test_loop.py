"""The real speculative loop: lossless, and what over-fitting one text must reach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draft_svc.training.decoder import BatchDecoder, Job
from draft_svc.training.draft import DraftNet
from draft_svc.training.evaluate import EvalPrompt, evaluate, ngram_rounds
from draft_svc.training.loop import Outcome, noise, speculate
from draft_svc.training.net import TargetNet
from engine.noise import gumbel
from tests.engine.tiny import LATENT, VOCAB, load_tiny, random_ids
from tests.training.toys import corpus_of, spec, tiny_target, trainer_of


def greedy(net: TargetNet, prompts: list[list[int]], max_new: int) -> list[list[int]]:
    """The target's own continuation, by the batched decoder."""
    decoder = BatchDecoder(net, slots=3, max_length=128, stop_ids=(), stride=4)
    jobs = [Job(p, max_new, tag=i) for i, p in enumerate(prompts)]
    found = {}
    for batch in decoder.run(lambda n: [jobs.pop() for _ in range(min(n, len(jobs)))]):
        found |= {done.job.tag: done.ids for done in batch}
    return [found[i] for i in range(len(prompts))]


@pytest.mark.parametrize(
    "text", ["dflash", "dspark,rank=8", "dspark,rank=8,slots=next_token,block=7"]
)
def test_over_fitting_one_text_accepts_whole_blocks(tmp_path: Path, text: str) -> None:
    """DF-1, DF-3, DF-10: a draft that knows one text by heart reaches tau = proposals + 1 in the
    real loop; a label, tap or position that is one off cannot."""
    net = tiny_target(tmp_path)
    prompt = random_ids(5, seed=3)
    answer = greedy(net, [prompt], 40)[0]
    trainer = trainer_of(
        net, [text + ",taps=0/2"], corpus_of([[*prompt, *answer]] * 8, 5), steps=80, lr=5e-3
    )
    trainer.measure_scale()
    trainer.run()
    outcome = speculate(net, trainer.drafts[0], [prompt], max_new=33, stop_ids=())[0]
    assert outcome.ids == answer[:33]
    assert outcome.accepted == [7, 7, 7, 7] and outcome.tau == 8.0
    # What accepts beyond the limit in its last round does not disturb the others.
    both = speculate(net, trainer.drafts[0], [prompt, random_ids(5, 4)], max_new=34, stop_ids=())
    assert [both[0].ids, both[1].ids] == [answer[:34], greedy(net, [random_ids(5, 4)], 34)[0]]


def test_any_draft_gives_the_targets_text(tmp_path: Path) -> None:
    """Random drafts change no token, greedy or sampled; what is emitted adds up."""
    net = tiny_target(tmp_path)
    prompts = [random_ids(n, seed=n) for n in (4, 9, 6, 17)]
    wanted = greedy(net, prompts, 20)
    texts = []
    for seed, text in enumerate(("dspark,rank=4,taps=0/3", "dflash,taps=0/3")):
        draft = DraftNet(spec(net, text), net, seed)
        outcomes = speculate(net, draft, prompts, max_new=20, stop_ids=(), together=3)
        assert [o.ids for o in outcomes] == wanted
        assert all(sum(o.emitted) == 19 for o in outcomes)
        warm = speculate(net, draft, prompts, max_new=20, stop_ids=(), temperature=0.9, seed=5)
        texts.append([o.ids for o in warm])
    assert texts[0] == texts[1] != wanted
    stop = wanted[1][7]
    outcome = speculate(net, draft, prompts[1:2], max_new=20, stop_ids=(stop,))[0]
    assert outcome.ids == wanted[1][: wanted[1].index(stop) + 1]


def test_generator_equals_the_engine(tmp_path: Path) -> None:
    """Greedy answers of the batched decoder, slots refilled, are the engine's own."""
    from tests.engine.tiny import run

    net = tiny_target(tmp_path)
    prompts = [random_ids(n, seed=n) for n in (4, 30, 7, 12, 5)]
    engine = load_tiny(tmp_path)
    for prompt, answer in zip(prompts, greedy(net, prompts, 12), strict=True):
        table = engine.allocate(64)
        logits, _ = run(engine, [(table, [*prompt, *answer], 0)])
        wanted = logits[0].argmax(-1).tolist()[len(prompt) - 1 : -1]
        assert answer == wanted
        table.free()


LATENT_V3 = LATENT | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}


@pytest.mark.parametrize(
    ("family", "more"), [("llama", {}), ("qwen3", {"head_dim": 24}), ("deepseek_v3", LATENT_V3)]
)
def test_taps_are_the_engines(tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    """DF-5, DF-6: outputs of layers before any norm, the last layer included."""
    from tests.engine.tiny import run

    net = tiny_target(tmp_path, family, **more)
    ids = random_ids(11)
    engine = load_tiny(tmp_path)
    _, wanted = run(engine, [(engine.allocate(32), ids, 0)], taps=(0, 2, 3))
    with torch.no_grad():
        _, got = net.forward(torch.tensor(ids), net.causal(1, 11), (0, 2, 3))
    assert got is not None and wanted is not None
    torch.testing.assert_close(got, wanted.float(), rtol=1e-4, atol=1e-4)


def test_noise_is_the_engines() -> None:
    index = torch.tensor([[4, 5], [70, 71]])
    got = noise(12345678901, torch.tensor([0, 3]), index, VOCAB)
    for row, choice in enumerate((0, 3)):
        for column in range(2):
            wanted = gumbel(12345678901, choice, int(index[row, column]), VOCAB)
            assert torch.equal(got[row, column], wanted)


def test_report_of_a_known_outcome(tmp_path: Path) -> None:
    """Looping outputs are left out of tau; lookup on a repeating text gains."""
    rng = np.random.default_rng(1)
    fresh = rng.permutation(90)[:30].tolist()
    outcome = Outcome([1, 2, 3], fresh, [7, 0, 3], [8, 1, 4])
    assert outcome.tau == 13 / 3
    assert ngram_rounds(outcome, 7) == (29, 29)
    looped = Outcome([1, 2, 3], [5, 6, 7] * 10, [7, 7], [8, 8])
    tokens, rounds = ngram_rounds(looped, 7)
    assert tokens == 29 and rounds < 12
    from draft_svc.training.evaluate import _report

    report = _report("all", [outcome, looped], 0.0, 7)
    assert (report.prompts, report.looping) == (2, 1)
    assert report.tau == report.tau_mean == round(13 / 3, 3) and report.tau_all == 5.8
    assert report.ngram_tau == 1.0
    assert report.accept == [0.667, 0.667, 0.667, 0.333, 0.333, 0.333, 0.333]
    assert report.conditional == [0.667, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0]
    net = tiny_target(tmp_path)
    draft = DraftNet(spec(net, "dflash"), net, 0)
    prompts = [EvalPrompt("a", random_ids(4)), EvalPrompt("b", random_ids(5))]
    assert [r.category for r in evaluate(draft, prompts, max_new=6, stop_ids=())] == ["a", "b"]
