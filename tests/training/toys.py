"""A tiny target, a corpus of its own greedy text, and small drafts, all in fp32 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from draft_svc.training.batches import BatchOptions
from draft_svc.training.net import TargetNet, load_target
from draft_svc.training.schedule import TrainOptions
from draft_svc.training.shards import Corpus
from draft_svc.training.spec import DraftSpec, parse_spec
from draft_svc.training.trainer import Trainer
from tests.engine.tiny import VOCAB, write_model

torch.set_num_threads(1)  # tiny products: threads cost more than they give
CPU = torch.device("cpu")
MASK = 9
BATCHES = BatchOptions(tokens=256, block_tokens=512, density=0.5, max_length=96)


def tiny_target(directory: Path, family: str = "llama", **overrides: object) -> TargetNet:
    write_model(directory, family, **overrides)
    return load_target(directory, CPU, torch.float32)


def corpus_of(documents: Sequence[Sequence[int]], prompt: int = 3) -> Corpus:
    return Corpus(
        np.array([i for d in documents for i in d], dtype=np.uint16),
        np.cumsum([0, *(len(d) for d in documents)]),
        np.full(len(documents), prompt, dtype=np.int32),
        np.zeros(len(documents), dtype=np.float32),
        np.zeros(len(documents), dtype=np.int32),
    )


def random_documents(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(10, VOCAB, rng.integers(12, 40)).tolist() for _ in range(count)]


def spec(net: TargetNet, text: str) -> DraftSpec:
    return parse_spec(f"{text},mask={MASK},intermediate=96", net.config)


def trainer_of(net: TargetNet, texts: Sequence[str], corpus: Corpus, **options: object) -> Trainer:
    defaults: dict[str, object] = {"batches": BATCHES, "steps": 4, "gate_minutes": 0.0}
    specs = [spec(net, text) for text in texts]
    return Trainer(net, specs, corpus, TrainOptions(**(defaults | options)), lambda _: None)
