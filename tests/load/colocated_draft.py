"""Part of `bench_gpu_draft`: a drafter in its target's process on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from draft_svc.colocated import BlockDrafter
from engine.api import Ask, Item, Sampling
from engine.config import EngineConfig
from engine.runner import NativeEngine
from tests.service.colocated_draft_check import pair, rounds, text_of

CONTEXT = 512
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "sampled": Sampling(temperature=0.9, seed=5, top_p=0.9, top_k=40),
}


@dataclass(frozen=True)
class Pair:
    """Checkpoints of a target and a draft, and how both run."""

    name: str
    method: str
    target: str
    draft: Path
    config: EngineConfig
    k: int

    def load(self, **changes: object) -> tuple[NativeEngine, BlockDrafter]:
        config = replace(self.config, **changes)  # type: ignore[arg-type]
        return pair(
            Path(self.target), self.draft, self.method, config,
            cuda_graph_mode=config.cuda_graph_mode, attention_backend=config.attention_backend,
        )  # fmt: skip


def check(
    own: Pair, sessions: int, count: int, vocabulary: int, kinds: tuple[str, ...] = tuple(SAMPLINGS)
) -> Iterator[tuple[str, object]]:
    """The text with drafts is that of plain decoding, and graphs propose what launches do."""
    prompts = [
        [(7 * i + 13 * n) % vocabulary + 3 for i in range(9 + 5 * n)] for n in range(sessions)
    ]
    graphs, eager = own.load(), own.load(cuda_graph_mode="NONE")
    report = graphs[1]._model.attention
    yield "attention", f"{report.chosen}, graphs {report.graph_mode}"
    device = graphs[1]._method.info.device
    yield "target and draft on", f"{graphs[0].info.device}, {device}"
    for kind in kinds:
        sampling = SAMPLINGS[kind]
        drafted = rounds(*graphs, prompts, sampling, count, k=own.k)
        launched = rounds(*eager, prompts, sampling, count, k=own.k)
        yield f"{kind}: graphs propose what launches do", drafted == launched
        texts = [text_of(one) for one in drafted]
        plain = rounds(graphs[0], None, prompts, sampling, max(map(len, texts)))
        same = [text == text_of(one)[: len(text)] for text, one in zip(texts, plain, strict=True)]
        yield f"{kind}: the text is that of plain decoding", all(same)
        partly = rounds(*graphs, prompts, sampling, count, own=True, k=own.k)
        yield (
            f"{kind}: the same beside a session that is not drafted for",
            partly[:-1] == drafted[:-1],
        )
        tokens = sum(map(len, texts)) / sum(map(len, drafted))
        yield f"{kind}: tokens a round", f"{tokens:.2f}"


def times(own: Pair) -> Iterator[str]:
    """Medians of a verify step of 8 rows with the draft's context written, and of the proposal."""
    for mode in ("auto", "NONE"):
        engine, drafter = own.load(cuda_graph_mode=mode)
        for count in (1, 8, 32, 128):
            tables = [engine.allocate(CONTEXT + 32) for _ in range(count)]
            spent: dict[str, list[float]] = {"step alone": [], "step": [], "proposal": []}
            for turn in range(50):
                drafted = turn % 2 == 0
                for table in tables:
                    table.length, table.covered = CONTEXT, {own.method: 0}
                items = [
                    Item(
                        t, [5] * 8, CONTEXT, 8, SAMPLINGS["greedy"],
                        context=[5] * (CONTEXT + 1), drafted=drafted,
                    )
                    for t in tables
                ]  # fmt: skip
                began = time.perf_counter()
                engine.step(items)
                done = time.perf_counter()
                spent["step" if drafted else "step alone"].append((done - began) * 1e3)
                if drafted:
                    asks = [Ask(t, 5, own.k, SAMPLINGS["greedy"]) for t in tables]
                    began = time.perf_counter()
                    drafter.propose(asks)
                    spent["proposal"].append((time.perf_counter() - began) * 1e3)
                torch.cuda.synchronize()
            for table in tables:
                table.free()
            parts = [f"{name} {statistics.median(s[5:]):.3f} ms" for name, s in spent.items()]
            yield f"graphs {mode}, {count} sessions: {', '.join(parts)}"
