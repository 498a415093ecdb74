"""Attention backends on a GPU: correctness, and time over what the bytes of the keys take.

python -m tests.load.bench_attention --check           every backend against fp64, in parallel
                                     (--part 1/2, --part 2/2: half of the cases each)
python -m tests.load.bench_attention --time --out F    decode and verify, against torch's kernels
python -m tests.load.bench_attention --sweep           which tiles are best here, where it matters
--flashinfer times it too, where it is installed: it compiles for minutes. --parts times ours with
keys cut in parts of each size, whatever the schedule chooses.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from tests.engine import attention_cases as cases
from tests.load import attention_kernels, attention_sweep
from tests.load import attention_times as times

WORKERS, COMPILERS = 14, 16


def check_one(case: cases.Case) -> tuple[str, list[str], str]:
    """(case, what is wrong, what was found) of one case."""
    limit, wrong = cases.LIMITS[case.types[0]], []
    try:
        found = cases.errors(case, cases.batch_of())
        wrong += [f"{mode}: {error:.1e}" for mode, error in found.items() if not error < limit]
        if case.backend == "TRITON_ATTN" and case.bits:
            wrong += [f"not the same bits: {text}" for text in cases.unequal_rows(case, SHORT)]
            for width in cases.WIDTHS:
                unequal = cases.unequal_replays(case, width)
                wrong += [f"replay of width {width} differs: {text}" for text in unequal]
            error = cases.lse_error(case)
            wrong += [f"log-sum-exp off by {error:.1e}"] if not error < 1e-2 else []
        return str(case), wrong, f"worst error {max(found.values()):.1e}"
    except Exception:  # one case must not hide the others
        return str(case), [traceback.format_exc()], ""
    finally:
        torch.cuda.empty_cache()


SHORT = cases.batch_of(6000)


def chosen_cases(only: str, part: str) -> list[cases.Case]:
    todo = [case for case in cases.all_cases() if only in str(case)]
    if not importlib.util.find_spec("flashinfer"):
        todo = [case for case in todo if case.backend != "FLASHINFER"]
        print("FLASHINFER is not installed: not checked")
    number, parts = map(int, part.split("/"))
    assert 1 <= number <= parts, f"part {part}: the first is 1, the last {parts}"
    todo = todo[number - 1 :: parts]
    # Those that compile longest, or run longest, go first.
    slow = ("FLEX_ATTENTION", "FLASHINFER")
    return sorted(todo, key=lambda case: (case.backend not in slow, not case.bits))


def check(workers: int, only: str, part: str) -> int:
    begun, failed = time.monotonic(), 0
    todo = chosen_cases(only, part)
    if not todo:
        print(f"no case is named {only!r} in part {part}: nothing was checked")
        return 1
    worst: dict[str, list[str]] = {}
    compilers = min(len(os.sched_getaffinity(0)), COMPILERS)
    # Workers that compile need no GPU; those that run cases set up theirs with the first one.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.load.bench_attention", "engine.attention.triton_attn"])
    with ProcessPoolExecutor(compilers, context, torch.set_num_threads, (1,)) as pool:
        attention_kernels.compile_all([c for c in todo if c.backend == "TRITON_ATTN"], pool)
    compiled = time.monotonic() - begun
    with ProcessPoolExecutor(workers, context, torch.set_num_threads, (1,)) as pool:
        running = {pool.submit(check_one, case): case for case in todo}
        for future in as_completed(running):
            try:
                name, wrong, found = future.result()
            except BrokenProcessPool as error:
                name, wrong, found = str(running[future]), [str(error)], ""
            worst.setdefault(name.split()[0], []).append(found)
            failed += bool(wrong)
            since = f"({time.monotonic() - begun:.0f} s)"
            print(f"{'WRONG' if wrong else 'ok':<6}{name}: {found} {since}", flush=True)
            for text in wrong:
                print(f"WRONG {name}: {text}", flush=True)
    for name, found in sorted(worst.items()):
        print(f"{name}: {len(found)} cases, {max(found, key=lambda text: text[-7:] or ' ')}")
    spent = time.monotonic() - begun
    print(f"{len(todo)} cases, {failed} wrong, {spent:.0f} s, {compiled:.0f} s of them to compile")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--part", default="1/1", help="of the cases to check")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--flashinfer", action="store_true")
    parser.add_argument("--parts", action="store_true", help="with keys cut otherwise, too")
    parser.add_argument("--only", default="", help="cases or shapes whose name contains this")
    parser.add_argument("--shape", dest="only", help="the same")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--page", type=int, default=16, help="tokens a page, when timing")
    chosen = parser.parse_args()
    code, results = 0, {}
    if chosen.check:
        code = check(chosen.workers, chosen.only, chosen.part)
    if chosen.time:
        results = times.run(chosen.only, chosen.page, chosen.flashinfer, chosen.parts)
    if chosen.sweep:
        results["sweep"] = attention_sweep.run(
            chosen.only, chosen.page, chosen.flashinfer, chosen.workers
        )
    if chosen.out:
        chosen.out.write_text(json.dumps(results, indent=1) + "\n")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
