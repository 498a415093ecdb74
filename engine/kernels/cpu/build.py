"""Compiles the C kernels once and keeps the library in a cache directory.

The library is linked without an OpenMP runtime of its own: its GOMP symbols resolve to the one that
torch has loaded, so both share one pool of threads. No compiler, or a build that fails, is not an
error: the caller gets the reason and uses torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

import torch

from engine.cache_dir import cache_lock, cache_root

SOURCES = ("gemm.c", "attention.c", "ops.c", "gumbel.c")
HEADERS = ("vec.h", "attention_kv.h")
FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fopenmp", "-fPIC", "-w"),
)
BUILD_SECONDS = 120
# Runs the compiler, and ends it and what it has started once stdin ends: it ends with the service,
# however that ends, and a compiler that is ended removes its temporary files.
_GUARDED = """
exec 3<&0
"$@" </dev/null 3<&- &
compiler=$!
(read -r _ <&3; kill 0) >/dev/null 2>&1 &
wait $compiler
status=$?
kill $!
exit $status
"""


class BuildUnavailable(Exception):
    """The kernels cannot be had here; the text says why."""


def _cpu_model() -> str:
    """What -march=native depends on: a library built on another CPU must not be loaded here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _run(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        raise BuildUnavailable(f"no C compiler ({Path(command[0]).name} not found)")
    end, held = os.pipe()
    try:
        done = subprocess.run(
            ["sh", "-c", _GUARDED, "sh", *command],
            stdin=end,
            capture_output=True,
            text=True,
            timeout=BUILD_SECONDS,
            start_new_session=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildUnavailable(f"the C compiler did not run: {type(error).__name__}") from None
    finally:
        os.close(end)
        os.close(held)
    if done.returncode != 0:
        # Only the text behind "error:": what stands before it is a path.
        errors = [line for line in done.stderr.splitlines() if "error:" in line]
        detail = errors[0].split("error:", 1)[1].strip()[:160] if errors else "no message"
        raise BuildUnavailable(f"the C compiler failed with status {done.returncode}: {detail}")
    return done.stdout


def _key(compiler: list[str], folder: Path) -> str:
    parts = [_run([*compiler, "--version"]), " ".join([*compiler, *FLAGS]), _cpu_model()]
    parts += [(folder / name).read_text() for name in (*SOURCES, *HEADERS)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def build_library() -> Path:
    """Path of the compiled library. Of processes that start together one builds, and the others
    wait for it."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    folder = Path(__file__).parent
    library = cache_root() / "kernels" / f"specwire-{_key(compiler, folder)}.so"
    if library.exists():
        return library
    try:
        with cache_lock("kernels/build"):
            if not library.exists():
                _build(compiler, folder, library)
    except OSError as error:
        raise BuildUnavailable(f"the kernel cache cannot be written: {error.strerror}") from None
    return library


def _build(compiler: list[str], folder: Path, library: Path) -> None:
    """Under the lock: a scratch folder that is there is of a process that ended within a build."""
    scratch = library.parent / "build.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        objects = []
        for name in SOURCES:
            objects.append(str(scratch / f"{name}.o"))
            _run([*compiler, *FLAGS, "-c", str(folder / name), "-o", objects[-1]])
        built = scratch / "library.so"
        # Linked without -fopenmp: the GOMP symbols stay open until the runtime is found.
        _run([*compiler, "-shared", "-o", str(built), *objects])
        built.replace(library)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _load_openmp() -> None:
    """Makes the OpenMP runtime visible to the library: torch's own copy, else the system's."""
    root = Path(torch.__file__).parent
    bundled = [*root.glob("lib/libgomp*"), *root.parent.glob("torch.libs/libgomp*")]
    for candidate in [*map(str, bundled), "libgomp.so.1"]:
        try:
            ctypes.CDLL(candidate, ctypes.RTLD_GLOBAL)
            return
        except OSError:
            continue
    raise BuildUnavailable("no GNU OpenMP runtime (libgomp) was found")


@functools.cache
def load_library() -> ctypes.CDLL | str:
    """The kernels, or the reason why there are none."""
    try:
        path = build_library()
        _load_openmp()
        return ctypes.CDLL(str(path))
    except BuildUnavailable as error:
        return str(error)
    except OSError:
        return "the compiled kernels do not load on this machine"
