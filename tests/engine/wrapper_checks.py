"""FLASHINFER, FLASH_ATTN and FLEX_ATTENTION against fp64, each in a process of its own:

python -m tests.engine.wrapper_checks [BACKEND ...]

Built as a service builds them: resolved by name first, so what cannot be had says why. One line a
backend, and one more for each case that is wrong.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import torch

from engine.attention.select import AttentionOptions, make_backend, resolve_attention
from engine.errors import BackendUnavailable
from tests.engine import attention_cases as cases

BACKENDS = ("FLASHINFER", "FLASH_ATTN", "FLEX_ATTENTION")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = "bfloat16" if DEVICE == "cuda" else "float32"
_LIMIT_S = 170
# Every query length 1 to 16 at contexts up to 8k, and chunks of prompts.
BATCHES = (
    [(cases.CONTEXTS[i % len(cases.CONTEXTS)], 1 + i) for i in range(16)],
    [(0, 40), (700, 333), (8192 - 8, 8), (0, 1)],
    [(2048, 8)],
)
SHORT = ([(0, 5), (60, 1), (33, 8)], [(0, 1), (17, 3)])


def cases_of(backend: str) -> Iterator[cases.Case]:
    if DEVICE == "cpu":
        yield cases.Case(backend, 64, 2, 16, DTYPE, device=DEVICE)
        return
    for dim, ratio, page in ((64, 1, 16), (64, 3, 32), (64, 8, 64), (128, 4, 16), (128, 8, 32)):
        yield cases.Case(backend, dim, ratio, page, DTYPE)


def wrong_of(case: cases.Case) -> tuple[float, list[str]]:
    """Largest error of all modes and batches, and what is beyond the limit. One backend runs all
    batches of a size, as the steps of a service are."""
    batches = BATCHES if DEVICE == "cuda" else SHORT
    longest = [(s, r) for batch in batches for s, r in batch]
    cache, spans = cases.build(case, longest)
    modes = cases.modes_of(case)
    resolution = resolve_attention(
        AttentionOptions(case.backend, case.dtype, case.page),
        heads=case.ratio * case.kv_heads,
        kv_heads=case.kv_heads,
        head_dim=case.dim,
        modes=modes,
        native=True,
        device=DEVICE,
        dtype=case.dtype,
    )
    backend = make_backend(resolution, cache)
    worst, wrong = 0.0, []
    for batch in batches:
        own, first = [], 0
        for _ in batch:
            span = spans.pop(0)
            own.append(cases.replace(span, first_row=first))
            first += span.row_count
        padded = cases.queries(case, own)
        q = torch.cat((padded, padded[:3]))  # rows behind the last span
        plan = backend.plan(own)
        for layer, mode in enumerate(modes):
            out = backend.run(plan, layer, q)
            wanted = cases.reference(cache, layer, mode, own, q)
            for span in own:
                rows = slice(span.first_row, span.first_row + span.row_count)
                error = float((out[rows] - wanted[rows]).norm() / wanted[rows].norm())
                worst = max(worst, error)
                if not error < cases.LIMITS[case.types[0]]:
                    wrong.append(f"{mode}, {span.row_count} rows at {span.start}: {error:.1e}")
            if out[first:].any():
                wrong.append(f"{mode}: rows behind the last span are not zero")
    return worst, wrong


def check(backend: str) -> int:
    began, worst, count, failed = time.monotonic(), (0.0, ""), 0, 0
    for case in cases_of(backend):
        try:
            error, wrong = wrong_of(case)
        except BackendUnavailable as refusal:
            print(f"{backend}: refused: {refusal}")
            return 0
        except Exception as problem:  # one case must not hide the others
            error, wrong = 0.0, [f"{type(problem).__name__}: {str(problem)[:600]}"]
        worst, count = max(worst, (error, str(case))), count + 1
        failed += bool(wrong)
        for text in wrong[:4]:
            print(f"WRONG {case}: {text}", flush=True)
    spent = time.monotonic() - began
    where = f"worst error {worst[0]:.1e} ({worst[1]})"
    print(f"{backend} on {DEVICE}: {count} cases, {failed} wrong, {where}, {spent:.0f} s")
    return failed


def main(names: list[str]) -> int:
    if len(names) == 1:
        return check(names[0])
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.engine.wrapper_checks", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in names or BACKENDS
    ]
    failed, deadline = 0, time.monotonic() + _LIMIT_S
    for name, process in zip(names or BACKENDS, running, strict=True):
        try:
            said, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            said += f"\nWRONG {name}: not done after {_LIMIT_S} s"
        print(said.strip()[-3000:], flush=True)
        failed += process.returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(min(main(sys.argv[1:]), 1))
