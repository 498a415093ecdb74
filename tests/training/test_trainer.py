"""The trainer: resume, several drafts at once, schedule, the kernels of the GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draft_svc.training.evaluate import EvalPrompt, Gate
from draft_svc.training.schedule import TrainOptions, schedule
from draft_svc.training.trainer import Trainer
from engine.errors import CheckpointError
from tests.engine.tiny import random_ids
from tests.training.toys import corpus_of, random_documents, tiny_target, trainer_of

BOTH = ["dflash,taps=0/2", "dspark,rank=4,taps=1/3"]


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for d in trainer.drafts for p in d.parameters]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_equals_an_uninterrupted_run(tmp_path: Path, optimizer: str) -> None:
    net = tiny_target(tmp_path)
    corpus = corpus_of(random_documents(30))

    def begin() -> Trainer:
        return trainer_of(net, BOTH, corpus, steps=7, optimizer=optimizer)

    whole = begin()
    whole.measure_scale()
    assert whole.run()
    broken = begin()
    broken.measure_scale()
    stream = broken.batches.stream()
    for step in range(3):
        batch, broken.place = next(stream)
        broken.train_step(batch, step / 7)
        broken.step += 1
    broken._save(tmp_path / "trainer.pt")
    resumed = begin()
    resumed.resume(tmp_path / "trainer.pt")
    assert resumed.step == 3 and resumed.run()
    assert resumed.step == whole.step == 7
    for a, b in zip(state_of(whole), state_of(resumed), strict=True):
        assert torch.equal(a, b)
    other = trainer_of(net, BOTH[:1], corpus)
    with pytest.raises(CheckpointError, match="other drafts"):
        other.resume(tmp_path / "trainer.pt")


def test_drafts_trained_together_equal_drafts_trained_alone(tmp_path: Path) -> None:
    """Sharing the target's forward changes nothing but speed."""
    net = tiny_target(tmp_path)
    corpus = corpus_of(random_documents(20))
    together = trainer_of(net, BOTH, corpus, steps=3)
    together.measure_scale()
    together.run()
    alone = trainer_of(net, BOTH[:1], corpus, steps=3)
    alone.measure_scale()
    alone.run()
    for name, parameter in alone.drafts[0].p.items():
        torch.testing.assert_close(parameter, together.drafts[0].p[name], rtol=1e-4, atol=1e-6)
    with pytest.raises(CheckpointError, match="equally many"):
        trainer_of(net, ["dflash", "dflash,block=5,name=b"], corpus)


def test_a_call_ends_early_and_the_next_goes_on(tmp_path: Path) -> None:
    net = tiny_target(tmp_path)
    lines: list[str] = []
    corpus = corpus_of(random_documents(20))
    options = TrainOptions(
        minutes=10, stop_after_minutes=1e-9, batches=trainer_of(net, BOTH, corpus).options.batches
    )
    trainer = Trainer(
        net, [d.spec for d in trainer_of(net, BOTH, corpus).drafts], corpus, options, lines.append
    )
    assert not trainer.run(checkpoint=tmp_path / "trainer.pt")
    assert (tmp_path / "trainer.pt").is_file()


def test_the_gate_runs_the_real_loop(tmp_path: Path) -> None:
    net = tiny_target(tmp_path)
    lines: list[str] = []
    trainer = trainer_of(net, BOTH, corpus_of(random_documents(20)), gate_minutes=1e-9)
    trainer.say = lines.append
    gate = Gate([EvalPrompt("maths", random_ids(5)), EvalPrompt("code", random_ids(7))], (), 8)
    assert trainer.run(gate)
    gates = [line for line in lines if line.startswith("gate")]
    assert len(gates) == 2 * 4 and all("maths 1." in g and "code 1." in g for g in gates)


def test_schedule() -> None:
    options = TrainOptions(warmup=0.1, final_lr=0.05)
    assert schedule(0.0, options) == 0.01
    assert schedule(0.05, options) == pytest.approx(0.5)
    assert schedule(0.1, options) == pytest.approx(1.0)
    assert schedule(0.55, options) == pytest.approx(0.525)
    assert schedule(1.0, options) == pytest.approx(0.05)


def test_scale_of_the_taps_folds_away(tmp_path: Path) -> None:
    """Training on taps / sigma is the exported fc on raw taps; position 0 does not count."""
    net = tiny_target(tmp_path)
    trainer = trainer_of(net, ["dflash,taps=0/2"], corpus_of(random_documents(30)))
    trainer.measure_scale()
    draft = trainer.drafts[0]
    batch, _ = next(trainer.batches.stream())
    _, taps = trainer._target(batch)
    inside = torch.arange(batch.ids.shape[1]) < batch.lengths[:, None]
    inside[:, 0] = False
    spread = (taps.flatten(2)[inside] * draft.tap_scale).std(0)
    assert float(spread.min()) > 0.5 and float(spread.max()) < 2.0
    exported = draft.export_state()["fc.weight"].float()
    wanted = draft.p["fc.weight"] * draft.tap_scale
    torch.testing.assert_close(exported, wanted.detach(), rtol=1e-2, atol=1e-5)


def test_triton_kernels_equal_their_definitions() -> None:
    """Runs them in Triton's interpreter, in a process of its own."""
    script = Path(__file__).with_name("triton_check.py")
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    for name in ("add_rms_norm", "rope", "decode_attention", "choose", "loss_stats", "loss_grad"):
        assert name in done.stdout or name == "loss_stats"
