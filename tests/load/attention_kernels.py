"""The kernels that cases of TRITON_ATTN launch, all compiled before the first of them runs: each by
one of several processes, which leave it in Triton's cache.

Which they are is found out by going through the cases without launching anything.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.compiling import Zeros
from tests.engine import attention_cases as cases


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel as Triton compiles it, in words that another process understands."""

    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]
    target: Any

    def __str__(self) -> str:
        names = "M", "R", "D", "PAGE", "CAUSAL", "WINDOWED", "WHOLE", "FINISH", "LSE", "PDL"
        order = list(self.signature)
        given = {order[path[0]]: value for path, value in self.constants.items()}
        return f"{self.name} " + " ".join(f"{n}={given[n]}" for n in names if n in given)


@contextmanager
def recorded(found: Callable[[Kernel], object]) -> Iterator[None]:
    """In between nothing is launched, and each kernel that would be is found once."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    seen = set[Any]()
    plain = JITFunction._do_compile
    target = driver.active.get_current_target()

    def record(
        self: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any,
        attrs: Any, warmup: bool,
    ) -> None:  # fmt: skip
        if (self, key) not in seen:
            seen.add((self, key))
            own = self.fn.__module__, self.fn.__name__
            found(Kernel(*own, signature, constexprs, attrs, dict(options.__dict__), target))

    JITFunction._do_compile = record
    try:
        with Zeros():
            yield
    finally:
        JITFunction._do_compile = plain


def compile_one(kernel: Kernel) -> tuple[float, str]:
    """Seconds, and what went wrong; needs no GPU."""
    import triton
    from triton.compiler import ASTSource

    began = time.monotonic()
    function = getattr(importlib.import_module(kernel.module), kernel.name)
    source = ASTSource(function, kernel.signature, kernel.constants, kernel.attributes)
    try:
        triton.compile(source, target=kernel.target, options=kernel.options)
    except Exception as error:  # the case that launches it will say so, too
        return time.monotonic() - began, f"{type(error).__name__}: {error}"
    return time.monotonic() - began, ""


def compile_all(todo: Sequence[cases.Case], pool: Executor) -> None:
    """Returns when what the cases need is compiled, or cannot be; prints how it goes."""
    began = time.monotonic()
    running: dict[Future[tuple[float, str]], Kernel] = {}

    def submit(kernel: Kernel) -> None:
        running[pool.submit(compile_one, kernel)] = kernel

    with recorded(submit):
        for case in todo:
            try:
                cases.launch_all(case)
            except Exception as error:  # it is then compiled for as it runs
                print(f"{case}: not recorded: {type(error).__name__}: {error}")
    print(f"{len(running)} kernels of {len(todo)} cases, {time.monotonic() - began:.0f} s")
    spent, shown = 0.0, began
    for done, future in enumerate(as_completed(running), 1):
        try:
            seconds, wrong = future.result()
        except BrokenProcessPool as error:
            seconds, wrong = 0.0, str(error)
        spent += seconds
        if wrong:
            print(f"{running[future]} cannot be compiled: {wrong}", flush=True)
        if time.monotonic() - shown > 10 or done == len(running):
            shown = time.monotonic()
            print(f"{done} compiled, {shown - began:.0f} s, {spent:.0f} s of work", flush=True)
