"""What a step with a prompt takes on a GPU: by CUDA graph and launched kernel by kernel, alone and
beside decoding sessions.

python -m tests.load.bench_prompts [--model DIR] [--shape smollm2-135m | qwen3-8b | tiny]

Without --model the weights are random: times do not depend on them. Each step is run both ways
and has to give the same tokens; those of steps that need not be exact (`fast`) may differ, as
padding decides who multiplies, and are counted only. Where a large model's steps have no graph both
ways are the same. On a CPU (under TRITON_INTERPRET=1, --shape tiny) it only shows that it runs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.api import Item, ItemResult, Sampling, WarmUp
from engine.config import EngineConfig
from engine.kv.pool import PageTable
from engine.loading import load_engine
from engine.ragged_words import Room
from engine.runner import NativeEngine
from tests.engine.fake_graphs import FakeGraphs
from tests.engine.interpreter import prepare
from tests.engine.prompt_mixes import launched
from tests.load.random_pair import SHAPES, write_target

ON_GPU = torch.cuda.is_available()
PROMPTS = (5, 40, 128, 300, 512, 1024) if ON_GPU else (5,)
SESSIONS = (0, 1, 8, 32) if ON_GPU else (0, 1)
CONTEXT = 512 if ON_GPU else 20
WARM, REPEATS = (4, 15) if ON_GPU else (0, 1)
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.9, seed=5, top_p=0.9)


@dataclass(frozen=True)
class Case:
    """A prompt of so many rows beside so many sessions that decode a token each."""

    prompt: int
    beside: int

    def __str__(self) -> str:
        return f"prompt of {self.prompt}, {self.beside} sessions beside"


def load(directory: Path) -> NativeEngine:
    if ON_GPU:
        config = EngineConfig(
            model=str(directory), device="cuda", kv_memory_mb=24576, max_length=8192
        )
    else:
        config = EngineConfig(
            model=str(directory), kernels="triton", attention_backend="TRITON_ATTN",
            dtype="float32", kv_pages=64, max_length=128,
        )  # fmt: skip
    engine = load_engine(config)
    assert engine._stepper is not None
    if not ON_GPU:
        engine._stepper._graphs = FakeGraphs()
    return engine


def decoding(engine: NativeEngine, count: int) -> list[PageTable]:
    """Sessions behind a context of their own."""
    tables = [engine.allocate(CONTEXT + 1) for _ in range(count)]
    for number, table in enumerate(tables):
        ids = [(7 * i + 13 * number) % 90 + 5 for i in range(CONTEXT)]
        engine.step([Item(table, ids, 0, 0)])
    return tables


def items_of(case: Case, own: PageTable, others: Sequence[PageTable], exact: bool) -> list[Item]:
    prompt = [(11 * i) % 90 + 5 for i in range(case.prompt)]
    return [
        Item(own, prompt, 0, 1, SAMPLED, exact=exact, context=prompt, prompt_len=case.prompt),
        *(
            Item(table, [9], CONTEXT, 1, SAMPLED if number % 2 else GREEDY, exact=exact)
            for number, table in enumerate(others[: case.beside])
        ),
    ]


def timed(engine: NativeEngine, items: Sequence[Item]) -> tuple[float, list[ItemResult]]:
    """Median ms of a step, tokens on the host included; the last result."""
    spent, found = [], list[ItemResult]()
    for _ in range(WARM + REPEATS):
        if ON_GPU:
            torch.cuda.synchronize()
        began = time.perf_counter()
        found = engine.step(items)
        spent.append((time.perf_counter() - began) * 1e3)
    return statistics.median(spent[WARM:]), found


def tokens(results: Sequence[ItemResult]) -> list[tuple[int, ...]]:
    return [result.tokens for result in results]


def run(engine: NativeEngine, exact: bool) -> int:
    """Prints a line a case; how many had other tokens."""
    others, wrong = decoding(engine, max(SESSIONS)), 0
    for beside in SESSIONS[1:]:
        alone = [Item(table, [9], CONTEXT, 1, GREEDY, exact=exact) for table in others[:beside]]
        print(f"{beside} sessions that decode, no prompt: {timed(engine, alone)[0]:.2f} ms")
    for prompt in PROMPTS:
        for beside in SESSIONS:
            case, own = Case(prompt, beside), engine.allocate(prompt)
            items = items_of(case, own, others, exact)
            found = {}
            for how, mode in (("graph", nullcontext()), ("launches", launched(engine))):
                with mode:
                    found[how] = timed(engine, items)
            own.free()
            (graph_ms, results), (launch_ms, expected) = found.values()
            equal = tokens(results) == tokens(expected)
            wrong += not equal
            print(
                f"{'exact' if exact else 'fast'}  {case}: graph {graph_ms:.2f} ms, launches"
                f" {launch_ms:.2f} ms, {launch_ms / graph_ms:.1f} x, "
                f"{'the same tokens' if equal else 'OTHER TOKENS'}",
                flush=True,
            )
    for table in others:
        table.free()
    return wrong


def warm_up(engine: NativeEngine) -> None:
    """As a service does, and how much time and memory it takes."""
    graphs: Any = engine._stepper._graphs  # type: ignore[union-attr]
    if not ON_GPU:
        return
    before, began = torch.cuda.memory_reserved(), time.monotonic()
    shapes = engine.warm_up(WarmUp(sessions=8, widest=8))
    rooms = [key for key in graphs._captured if isinstance(key[0], Room)]
    print(
        f"{shapes} shapes met in {time.monotonic() - began:.1f} s: {len(graphs._captured)} graphs, "
        f"{len(rooms)} of prompts, all in {graphs.spent_ns / 1e9:.1f} s and "
        f"{(torch.cuda.memory_reserved() - before) >> 20} MiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="smollm2-135m" if ON_GPU else "tiny"
    )
    options = parser.parse_args()
    if not ON_GPU:
        prepare()
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.model or Path(scratch)
        if options.model is None:
            write_target(directory, options.shape, "cuda" if ON_GPU else "cpu")
        engine = load(directory)
        print(f"{options.shape}, {engine.info.device}, rows independent {engine.rows_independent}")
        warm_up(engine)
        wrong = run(engine, exact=True)
        other = run(engine, exact=False) if ON_GPU else 0
        engine.check_integrity()
    print(f"exact: {wrong} cases with other tokens; fast: {other}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
