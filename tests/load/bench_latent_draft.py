"""A latent DSpark draft on a GPU, over a random DeepSeek target: `bench_gpu_draft`'s checks and
times, plain and fp8 KV, in a service's pages and in the target's; the tiny checks first.

python -m tests.load.bench_latent_draft            on a GPU
python -m tests.load.bench_latent_draft --tiny     the same small, under the interpreter
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch
from safetensors.torch import load_file

from engine.config import EngineConfig
from tests.engine import latent_draft_checks, latent_gpu
from tests.load import bench_gpu_draft as bench
from tests.load.colocated_draft import Pair
from tests.load.draft_setups import Setup
from tests.load.grid_models import write_latent_dspark

TINY = "--tiny" in sys.argv
_RANK = 24 if TINY else 256
_TAPS = (0, 1) if TINY else (1, 3)


def write_pair(folder: Path) -> None:
    sizes = latent_gpu.SMALL if TINY else latent_gpu.MEDIUM
    latent_gpu.write(folder / "target", sizes)
    state = load_file(folder / "target" / "model.safetensors")
    tables = state["model.embed_tokens.weight"].float(), state["lm_head.weight"].float()
    write_latent_dspark(folder / "draft", sizes, tables, _TAPS, _RANK)


def setup_of(folder: Path, kv: str) -> Setup:
    device = torch.device("cpu") if TINY else torch.device("cuda", 0)
    return Setup(
        f"latent dspark, KV {kv}", "dspark", folder / "draft", str(folder / "target"), device,
        64 if TINY else 8192, "TRITON_MLA", "TORCH_MLA", kv,
    )  # fmt: skip


def pair_of(folder: Path, kv: str) -> Pair:
    config = EngineConfig(
        device="cuda", kernels="triton", attention_backend="TRITON_MLA", max_length=2048,
        kv_memory_mb=4096, kv_dtype=kv,
    )  # fmt: skip
    if TINY:
        config = EngineConfig(
            device="cpu", kernels="triton", attention_backend="TRITON_MLA", dtype="float32",
            kv_pages=16, max_length=64, kv_dtype=kv,
        )  # fmt: skip
    return Pair(
        f"latent dspark, KV {kv}", "dspark", str(folder / "target"), folder / "draft", config, 7
    )


def parts(folder: Path) -> Iterator[tuple[str, partial[None]]]:
    if not TINY:  # the tests run them under the interpreter
        for name in [name for name in vars(latent_draft_checks) if name.startswith("check_")]:
            yield name, partial(getattr(latent_draft_checks, name))
    asked = (1, 1, 60, ("greedy",)) if TINY else (3, 12, 1000)
    lengths = (3, 9) if TINY else (3, 700, 65, 1500, 17)
    for kv in ("auto", "fp8"):
        setup, pair = setup_of(folder, kv), pair_of(folder, kv)
        yield setup.name, partial(bench.checked, setup, lengths)
        yield f"{pair.name} co-located", partial(bench.checked_lines, pair, asked)
        if not TINY:
            yield f"{setup.name} times", partial(bench.times, setup)
            yield f"{setup.name} writes", partial(bench.write_times, setup)
            yield f"{pair.name} co-located times", partial(bench.timed_lines, pair)


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_pair(folder)
        for name, run in parts(folder):
            began = time.monotonic()
            bench.attempt(name, run)
            print(f"      ({name}: {time.monotonic() - began:.0f} s)", flush=True)
            if not TINY:
                torch.cuda.empty_cache()
    print("failed: " + ", ".join(bench.FAILED) if bench.FAILED else "all checks passed")
    return len(bench.FAILED)


if __name__ == "__main__":
    raise SystemExit(main() > 0)
