"""Block drafts on a GPU: checks, times of a proposal and of a context write.

python -m tests.load.bench_gpu_draft [--check] [--time] [--target DIR or .gguf] [--tiny]

Without --check and --time both are done. Checked: graphs equal launches, a session alone equals one
among others, fp32 Triton equals fp32 torch token for token, and how often bf16 does. The shipped
drafts run over the default target where it is installed or named, and over random weights of its
shape otherwise. Then the same with the drafter in the target's process: the text is that of plain
decoding. --tiny does the checks on random small drafts, under the interpreter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch

from draft_svc.methods.base import Draft
from engine.api import Sampling
from engine.block_call import Wanted
from engine.config import EngineConfig
from engine.models.dflash import Block, DFlashModel
from engine.models.draft_context import ContextRows
from tests.load import colocated_draft
from tests.load.colocated_draft import Pair
from tests.load.draft_setups import Setup, real_setups, tiny_setups
from tests.load.random_pair import write_target

FP32: dict[str, Any] = {"weight_dtype": torch.float32}
CONTEXT = 512
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.9, seed=5, choice=1, top_p=0.9, top_k=50),
    Sampling(temperature=0.7, seed=2**63 + 9, min_p=0.02),
    Sampling(temperature=1.0, seed=77),
)


def rows(model: DFlashModel, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, model.config.row_width, generator=generator).bfloat16()


def sessions(model: DFlashModel, lengths: Sequence[int]) -> list[Wanted]:
    """Blocks behind random contexts, one way to draw after another."""
    found = []
    for index, length in enumerate(lengths):
        table = model.pool.allocate(0)
        model.write_context(table, 0, rows(model, length, index))
        block = Block(table, 5 + 31 * index % 40, length)
        k = max(1, model.max_draft_tokens - index % 3)
        found.append(Wanted(block, SAMPLINGS[index % len(SAMPLINGS)], k))
    return found


def free(wanted: Sequence[Wanted]) -> None:
    for own in wanted:
        own.block.table.free()  # type: ignore[union-attr]


def equal(found: Sequence[Draft], expected: Sequence[Draft]) -> str:
    pairs = [
        p for a, b in zip(found, expected, strict=True) for p in zip(a.ids, b.ids, strict=True)
    ]
    return f"{sum(a == b for a, b in pairs)} of {len(pairs)} tokens"


def check(setup: Setup, lengths: Sequence[int]) -> dict[str, object]:
    graphs, eager = setup.load(), setup.load(cuda_graph_mode="NONE")
    report = graphs._model.attention
    found: dict[str, object] = {"attention": f"{report.chosen}, graphs {report.graph_mode}"}
    own = {id(m): sessions(m._model, lengths) for m in (graphs, eager)}
    expected = eager.draft(own[id(eager)])
    for again in ("captured", "replayed"):
        found[f"graphs equal launches, {again}"] = graphs.draft(own[id(graphs)]) == expected
    alone = [graphs.draft([wanted])[0] for wanted in own[id(graphs)]]
    found["alone equals among others"] = [a.ids for a in alone] == [b.ids for b in expected]
    found["graphs equal launches after other shapes"] = graphs.draft(own[id(graphs)]) == expected
    plain = setup.load(**FP32, kernels="torch", attention_backend=setup.reference)
    fused = setup.load(**FP32)
    exact = plain.draft(sessions(plain._model, lengths))
    full = fused.draft(sessions(fused._model, lengths))
    found["fp32 Triton equals fp32 torch"] = equal(full, exact)
    gaps = [
        abs(a - b)
        for one, other in zip(full, exact, strict=True)
        for a, b, x, y in zip(one.confidences, other.confidences, one.ids, other.ids, strict=True)
        if x == y
    ]
    found["fp32 Triton's chances differ by at most"] = f"{max(gaps, default=0.0):.1e}"
    found["bf16 Triton equals fp32 torch"] = equal(expected, exact)
    return found


def median_ms(run: Callable[[], object], repeats: int = 30) -> float:
    spent = []
    for _ in range(repeats + 5):
        began = time.perf_counter()
        run()
        spent.append((time.perf_counter() - began) * 1e3)
    return statistics.median(spent[5:])


def times(setup: Setup) -> None:
    for mode, options in (("graphs", {}), ("launches", {"cuda_graph_mode": "NONE"})):
        method = setup.load(**options)
        method._confidences = False
        for count in (1, 8, 32, 128):
            wanted = sessions(method._model, [CONTEXT] * count)
            greedy = [Wanted(own.block, SAMPLINGS[0], own.k) for own in wanted]
            for kind, asked in (("greedy", greedy), ("mixed", wanted)):
                spent = median_ms(partial(method.draft, asked))
                print(f"{setup.name}  {mode}, {count} sessions, {kind}: {spent:.3f} ms", flush=True)
            free(wanted)


def write_again(model: DFlashModel, writes: Sequence[ContextRows]) -> None:
    for write in writes:
        write.table.truncate(0)
    model.write_contexts(writes)
    torch.cuda.synchronize()


def write_times(setup: Setup) -> None:
    model = setup.load()._model
    model.capture_writes()
    for count, each in ((1, 1), (1, 8), (32, 4), (128, 4), (1, 512)):
        tables = [model.pool.allocate(0) for _ in range(count)]
        given = [rows(model, each, n).view(torch.uint16).numpy() for n in range(count)]

        writes = [ContextRows(t, 0, own) for t, own in zip(tables, given, strict=True)]
        spent = median_ms(partial(write_again, model, writes))
        print(
            f"{setup.name}  context of {count} sessions x {each} rows: {spent:.3f} ms", flush=True
        )
        for table in tables:
            table.free()


def other_backends(setup: Setup) -> None:
    for name in ("FLASHINFER", "FLASH_ATTN", "TORCH_SDPA"):
        attempt(f"{setup.name} {name}", partial(other_backend, setup, name))


def other_backend(setup: Setup, name: str) -> None:
    method, usual = setup.load(attention_backend=name), setup.load()
    found, expected = (m.draft(sessions(m._model, [40, 300, 9])) for m in (method, usual))
    notes = "; ".join(method._model.attention.notes)
    print(f"{setup.name}  {name}: {equal(found, expected)} as TRITON_ATTN; {notes}", flush=True)


FAILED: list[str] = []


def attempt(name: str, run: Callable[[], None]) -> None:
    try:
        run()
    except Exception:  # the other cases are still worth their lines
        FAILED.append(name)
        print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)


def checked(setup: Setup, lengths: Sequence[int]) -> None:
    for name, value in check(setup, lengths).items():
        print(f"{setup.name}  {name}: {value}", flush=True)
        if value is False:
            FAILED.append(f"{setup.name} {name}")


def colocated(setup: Setup, folder: Path, options: argparse.Namespace, both: bool) -> None:
    """With the target's whole weights: the ones named or installed, else random ones."""
    config = EngineConfig(
        device=setup.device.type,
        kernels="triton",
        attention_backend="TRITON_ATTN",
        max_length=2048,
        kv_memory_mb=8192,
    )
    target, k = setup.target, 7
    if options.tiny:
        config, k = replace(config, dtype="float32", kv_pages=16, max_length=64), 4
    elif Path(target).is_dir():
        target = str(folder / "whole")
        if not Path(target).is_dir():
            write_target(Path(target), "smollm2-135m", "cuda")
    own = Pair(setup.name, setup.method, target, setup.draft, config, k)
    if both or options.check:
        asked = (2, 1, 60, ("sampled",)) if options.tiny else (5, 24, 1000)
        attempt(f"{own.name} co-located", partial(checked_lines, own, asked))
    if (both or options.time) and not options.tiny:
        attempt(f"{own.name} co-located times", partial(timed_lines, own))


def checked_lines(own: Pair, asked: tuple[Any, ...]) -> None:
    for name, value in colocated_draft.check(own, *asked):
        print(f"{own.name} co-located  {name}: {value}", flush=True)
        if value is False:
            FAILED.append(f"{own.name} co-located {name}")


def timed_lines(own: Pair) -> None:
    for line in colocated_draft.times(own):
        print(f"{own.name} co-located  {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for flag in ("--check", "--time", "--tiny"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--target", default="default")
    options = parser.parse_args()
    both = options.check == options.time
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        setups = tiny_setups(folder) if options.tiny else real_setups(folder, options.target)
        lengths = (3, 9, 14) if options.tiny else (3, 700, 65, 1500, 17, 258, 129)
        for setup in setups:
            if both or options.check:
                attempt(setup.name, partial(checked, setup, lengths))
            if options.tiny:
                continue
            if both or options.check:
                other_backends(setup)
            if (both or options.time) and setup.name.startswith("shipped"):
                attempt(f"{setup.name} times", partial(times, setup))
                attempt(f"{setup.name} writes", partial(write_times, setup))
            torch.cuda.empty_cache()
        for setup in setups:
            if options.tiny or setup.name.startswith("shipped"):
                colocated(setup, folder, options, both)
                torch.cuda.empty_cache()
    print("failed: " + ", ".join(FAILED) if FAILED else "all checks passed")


if __name__ == "__main__":
    main()
