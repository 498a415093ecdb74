"""The engine on a GPU: step times by width and batch, with and without CUDA graphs, and checks.

python -m tests.load.bench_gpu_engine [--model DIR] [--shape smollm2-135m | qwen3-8b]

Without --model the weights are random: times do not depend on them. "Launches in turn": no kernel
starts before the one in front of it has ended. Checked before anything is timed: graphs equal
launches, a session alone equals one among others, blocks equal single tokens, and greedy tokens
follow the reference operators up to near-ties, which are counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from engine.api import Item, Sampling
from engine.config import EngineConfig
from engine.kernels.triton.dependent import use_dependent_launch
from engine.loading import load_engine
from engine.runner import NativeEngine
from tests.load.random_pair import SHAPES, write_target

CONTEXT = 512


def load(directory: Path, **options: object) -> NativeEngine:
    base = EngineConfig(model=str(directory), device="cuda", kv_memory_mb=24576, max_length=4096)
    return load_engine(replace(base, **options))


def generate(
    engine: NativeEngine, sampling: Sampling, drafts: int, mates: int, count: int
) -> list[int]:
    """Tokens of the first of 1 + mates sessions, with wrong drafts of that many tokens."""
    prompts = [[(7 * i + 3 * m) % 1000 + 5 for i in range(40)] for m in range(1 + mates)]
    tables = [engine.allocate(0) for _ in prompts]
    ids = [list(prompt) for prompt in prompts]
    first = [
        Item(t, p, 0, 1, sampling, context=p, prompt_len=40)
        for t, p in zip(tables, prompts, strict=True)
    ]
    for y, result in zip(ids, engine.step(first), strict=True):
        y += result.tokens
    while len(ids[0]) < 40 + count:
        guess = [(len(ids[0]) * 31 + d) % 1000 for d in range(drafts)]
        items = [
            Item(
                t, [y[-1], *guess], len(y) - 1, 1 + drafts, sampling,
                taps=(0, 3), context=y, prompt_len=40,
            )
            for t, y in zip(tables, ids, strict=True)
        ]  # fmt: skip
        for y, result in zip(ids, engine.step(items), strict=True):
            y += result.tokens
    for table in tables:
        table.free()
    return ids[0][40 : 40 + count]


def step_ms(
    engine: NativeEngine, sessions: int, rows: int, exact: bool = True, repeats: int = 30
) -> float:
    """Median of a step, everything included: filling, copies, launches, tokens on the host."""
    tables = [engine.allocate(CONTEXT + rows) for _ in range(sessions)]
    spent = []
    for _ in range(repeats + 5):
        for table in tables:
            table.length = CONTEXT
        items = [
            Item(
                t,
                [1] * rows,
                CONTEXT,
                rows,
                Sampling(temperature=0.0),
                exact=exact,
                context=[1] * (CONTEXT + 1),
            )
            for t in tables
        ]
        began = time.perf_counter()
        engine.step(items)
        spent.append((time.perf_counter() - began) * 1e3)
    for table in tables:
        table.free()
    return statistics.median(spent[5:])


def check(directory: Path) -> dict[str, object]:
    greedy, sampled = Sampling(temperature=0.0), Sampling(temperature=0.9, seed=5, top_p=0.9)
    graphs, eager = load(directory), load(directory, cuda_graph_mode="NONE")
    found: dict[str, object] = {
        "device": graphs.info.device,
        "backend": graphs.attention.chosen,
        "rows independent": graphs.rows_independent,
    }
    for name, sampling in (("greedy", greedy), ("sampled", sampled)):
        expected = generate(eager, sampling, 0, 0, 64)
        found[f"{name}: graphs equal launches"] = generate(graphs, sampling, 0, 0, 64) == expected
        found[f"{name}: with drafts"] = generate(graphs, sampling, 7, 0, 64) == expected
        for mates, drafts in ((4, 3), (15, 7), (127, 7)):
            found[f"{name}: among {mates} others, {drafts} drafts"] = (
                generate(graphs, sampling, drafts, mates, 64) == expected
            )
    plain = load(directory, kernels="torch", dtype="float32")
    tokens = generate(plain, greedy, 0, 0, 64)
    same = zip(tokens, generate(graphs, greedy, 0, 0, 64), strict=True)
    found["greedy tokens equal to fp32 operators"] = f"{sum(a == b for a, b in same)} of 64"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2-135m")
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.model or Path(scratch)
        if options.model is None:
            write_target(directory, options.shape, "cuda")
        results: dict[str, object] = {} if options.skip_check else check(directory)
        for name, value in results.items():
            print(f"{name}: {value}")
        torch.cuda.empty_cache()
        times: dict[str, float] = {}
        modes = {
            "graphs": {},
            "launches in turn": {},
            "no graphs": {"cuda_graph_mode": "NONE"},
        }
        for mode, choice in modes.items():
            use_dependent_launch(mode != "launches in turn")
            engine = load(directory, **choice)
            for sessions in (1, 8, 32, 128) if mode == "graphs" else (1,):
                for rows in (1, 4, 8):
                    key = f"{mode}, {sessions} sessions x {rows}"
                    times[key] = step_ms(engine, sessions, rows)
                    print(f"{options.shape}  {key}: {times[key]:.3f} ms", flush=True)
                    if sessions * rows >= 64:
                        times[f"{key}, fast"] = step_ms(engine, sessions, rows, exact=False)
                        print(f"{options.shape}  {key}, fast: {times[f'{key}, fast']:.3f} ms")
            del engine
            torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps({"checks": results, "times_ms": times}, default=str))


if __name__ == "__main__":
    main()
