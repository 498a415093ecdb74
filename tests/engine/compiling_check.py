"""Triton's compiler for a GPU that is not there: what is compiled ahead, and nothing launched."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from engine.compiling import compile_first


class Absent:
    """The driver of an H200 that cannot launch anything."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@triton.jit  # type: ignore[untyped-decorator]
def _double(x, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(x + at, tl.load(x + at) * 2)


@triton.jit  # type: ignore[untyped-decorator]
def _wrong(x, N: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x + tl.arange(0, N), tl.zeros([N + 1], tl.float32))


def join(thread: Thread) -> None:
    thread.start()
    thread.join()


def kernels_of(kernel: Any) -> list[Any]:
    return list(kernel.device_caches[0][0].values())


def compiled(cache: Path) -> int:
    return len([*cache.rglob("*.cubin")])


def launch(*sizes: int, kernel: Any = _double) -> Callable[[], None]:
    x = torch.zeros(64)

    def run() -> None:
        for size in sizes:
            kernel[(1,)](x, size)

    return run


def main(cache: Path) -> None:
    compile_first("cpu", launch(16))
    assert compiled(cache) == 0

    compile_first("cuda:0", launch(16, 32, 16))
    assert compiled(cache) == 2
    # Held by the kernel itself: the launch behind it only looks it up.
    assert [type(one).__name__ for one in kernels_of(_double)] == ["CompiledKernel"] * 2
    print("compiled")

    found: list[torch.Tensor] = []
    one = torch.ones(512)
    compile_first(
        "cuda:0",
        lambda: found.extend([torch.empty(512), torch.empty_like(one), one.new_empty(512)]),
    )
    assert len(found) == 3 and not any(tensor.any() for tensor in found)
    print("zeros")

    try:
        compile_first("cuda:0", lambda: compile_first("cuda:0", launch(64)))
    except AssertionError:
        print("not within itself")

    def elsewhere() -> None:
        try:
            launch(16)()
        except AttributeError:  # of a driver that has no launcher
            print("others launch")

    compile_first("cuda:0", lambda: join(Thread(target=elsewhere)))

    compile_first("cuda:0", launch(64), stopped=lambda: True)
    assert compiled(cache) == 2
    print("stopped")

    compile_first("cuda:0", launch(16, kernel=_wrong))
    assert kernels_of(_wrong) == []
    try:
        launch(16, kernel=_wrong)()
    except triton.errors.TritonError:
        print("left to the launch")

    compile_first("cuda:0", launch(64))
    assert compiled(cache) == 3
    print("compiled")


if __name__ == "__main__":
    triton.runtime.driver.set_active(Absent())
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        main(Path(folder))
