"""What `bench_attention --check` compiles ahead, as on an H200 that is not there; launches nothing.

python -m tests.engine.attention_kernel_checks [--all]   the kernels of every case are compiled, too
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import triton

from engine.attention import triton_paged
from engine.attention.few_rows import equal_few_rows
from engine.attention.triton_attn import TritonAttention
from engine.kernels.triton import dependent
from tests.engine import attention_cases as cases
from tests.engine.compiling_check import Absent
from tests.load import attention_kernels as kernels
from tests.load import bench_attention


@contextmanager
def as_an_h200() -> Iterator[None]:
    """Backends of CPU tensors launch what those of an H200 would."""
    plain, kept = TritonAttention.__init__, triton_paged._INTERPRETED_PROCESSORS
    available = dependent.dependent_launch_available

    def built(self: Any, *args: Any, few_rows: int = 0, **options: Any) -> None:
        plain(self, *args, few_rows=few_rows, **options)
        self._ieee = not self._half
        if not few_rows:
            shape, tiles, modes = self.cache.geometry, self.tiles, tuple(dict.fromkeys(self.modes))
            self._few_rows = equal_few_rows(
                type(self), shape, self.query_heads, self.dtype, modes, tiles, self.cache.device
            )

    TritonAttention.__init__ = built  # type: ignore[method-assign]
    triton_paged._INTERPRETED_PROCESSORS = 132
    dependent.dependent_launch_available = lambda: True  # type: ignore[assignment]
    try:
        yield
    finally:
        TritonAttention.__init__ = plain  # type: ignore[method-assign]
        triton_paged._INTERPRETED_PROCESSORS = kept
        dependent.dependent_launch_available = available


def own_cases() -> list[cases.Case]:
    found = [case for case in cases.all_cases() if case.backend == "TRITON_ATTN"]
    return [replace(case, device="cpu") for case in found]


def names_of(case: cases.Case) -> list[str]:
    """Of what is compiled ahead."""
    found: list[kernels.Kernel] = []
    with kernels.recorded(found.append):
        cases.launch_all(case)
    return [repr(kernel) for kernel in found]


def names_of_checks(case: cases.Case) -> list[str]:
    """Of what the checks launch."""
    found: list[kernels.Kernel] = []
    plain = cases.reference
    cases.reference = lambda cache, layer, mode, spans, q: q.double()
    try:
        with kernels.recorded(found.append):
            text = bench_attention.check_one(case)[1]
    finally:
        cases.reference = plain
    assert not any("Traceback" in line for line in text), text
    return [repr(kernel) for kernel in found]


def compile_all(todo: list[cases.Case]) -> None:
    """In other processes, after which a launch of them here finds each in the cache."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engine.attention.triton_attn"])
    with ProcessPoolExecutor(os.cpu_count(), context, torch.set_num_threads, (1,)) as pool:
        kernels.compile_all(todo, pool)
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda cache_hit, **_: hits.append(cache_hit)
    from engine.compiling import compile_first

    for case in todo:
        compile_first("cuda", lambda case=case: cases.launch_all(case))
    print(f"{len(hits)} found, {hits.count(False)} not")


def main() -> None:
    triton.runtime.driver.set_active(Absent())
    with as_an_h200():
        if "--all" in sys.argv:
            compile_all(own_cases())
            return
        for case in own_cases():
            if case.dim == 64 and case.ratio in (1, 3) and (case.page == 16 or not case.bits):
                equal_few_rows.cache_clear()
                ahead = names_of(case)
                equal_few_rows.cache_clear()
                assert sorted(ahead) == sorted(names_of_checks(case)), case
        print("the same")
        few = next(case for case in own_cases() if not case.bits)
        compile_all([replace(few, causal=(False,))])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # of the processes that compile
        triton.knobs.cache.dir = folder
        main()
