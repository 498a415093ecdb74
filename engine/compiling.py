"""Kernels compiled side by side before they are needed: one after the other, those of a service
take minutes where none was compiled before."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

from engine.api import never
from engine.meeting import compile_errors

log = logging.getLogger(__name__)

# Each takes some 200 MB meanwhile, and a container may have less of the machine than it sees.
_AT_ONCE = 16


# Whether launches are to compile only, where they are made.
_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


class _Stopped(RuntimeError):
    """Nobody waits for what was not begun."""


class _Compilers(ThreadPoolExecutor):
    """Triton lets go of the interpreter's lock in its passes, and the assembler is a process."""

    def __init__(self, stopped: Callable[[], bool]) -> None:
        self.most = min(len(os.sched_getaffinity(0)), _AT_ONCE)
        self.count = 0
        super().__init__(self.most, thread_name_prefix="compile")
        self._is_stopped = stopped

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def unless_stopped() -> Any:
            if self._is_stopped():
                raise _Stopped
            return fn(*args, **kwargs)

        self.count += 1
        return super().submit(unless_stopped)


def compile_first(
    device: str, run: Callable[[], object], stopped: Callable[[], bool] = never
) -> None:
    """Calls `run` with launches that only have their kernel compiled, and returns when all of them
    are. On a CPU does nothing.

    Then whoever runs the same launches waits for no compiler. Nothing may be kept of what `run`
    returns: no launch has written anything, and what it allocates meanwhile holds zeros, which are
    safe to look things up with. A kernel that cannot be compiled, and whatever else goes wrong in
    between, is left to the launch that needs it.
    """
    if device == "cpu":
        return
    try:
        from triton import AsyncCompileMode
    except ImportError:  # of an older Triton, or there is none: each launch compiles
        return
    # Within another one nothing would be launched behind it, either.
    assert not _compiling.get()
    failures: tuple[type[Exception], ...] = (RuntimeError, *compile_errors())
    began = time.perf_counter()
    with _Compilers(stopped) as pool:
        try:
            with AsyncCompileMode(pool), _nothing_launched(), Zeros():
                run()
        except failures as error:
            if not isinstance(error, _Stopped):
                log.warning("not all is compiled ahead: %s", error)
    spent = time.perf_counter() - began
    log.info(
        "%d kernels compiled or found in %.1f s, up to %d at once", pool.count, spent, pool.most
    )


class Zeros(TorchFunctionMode):
    """Makes memory that a launch would have filled, such as tokens whose rows are gathered next,
    hold zeros."""

    _instead: ClassVar[dict[Callable[..., Any], Callable[..., Any]]] = {
        torch.empty: torch.zeros,
        torch.empty_like: torch.zeros_like,
        torch.Tensor.new_empty: torch.Tensor.new_zeros,
    }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self._instead.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def _nothing_launched() -> Iterator[None]:
    """What Triton calls a warm-up of a kernel, for every launch of this thread: of callers that
    know nothing of it."""
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=warmup or _compiling.get(), **options)

    JITFunction.run, token = compile_only, _compiling.set(True)
    try:
        yield
    finally:
        JITFunction.run = launch
        _compiling.reset(token)
