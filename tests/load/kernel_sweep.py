"""Tries tiles for the products of the measured shapes; prints the best of each.

Tiles are compiled by processes side by side, which leave the results in Triton's cache.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from typing import Any

import torch

from engine.kernels.triton import gemm
from engine.kernels.triton.tiles import FUSED_NORM_DEPTH, Tile, tile_of
from tests.load.kernel_shapes import EPS, SHAPES, normal, weight
from tests.load.kernel_times import CALLS, COLD_BYTES, replay_us

ROWS = 8
SHOWN = 4
MOST_SHARED_BYTES = 200 << 10

Job = tuple[str, int, int]  # role, n and k of the weight
ROLES = {"qkv": "norm", "out": "add", "gate_up": "gated", "down": "add", "head": "norm"}


def jobs() -> list[Job]:
    found = []
    for shape in SHAPES:
        forms = shape.products() | {"head": (shape.vocab, shape.hidden)}
        found += [(ROLES[name], *form) for name, form in forms.items()]
    return found


def tiles(role: str, n: int, k: int) -> list[Tile]:
    large = n * k > 1 << 23
    fused = role != "add" and k <= FUSED_NORM_DEPTH
    columns = (16, 32, 64) if large else (8, 16, 32)
    depths: tuple[int, ...] = (128, 256) if large else (64, 128, 256)
    warp_counts: tuple[int, ...] = (2, 4)
    if fused and not large:
        # Behind a norm each step costs a way through shared memory: few steps, or one, too.
        depths, warp_counts = (128, 256, 512, 1024), (1, 2, 4, 8)
    found, ways = [], (False, True) if large and not fused else (False,)
    forms = itertools.product(columns, depths, warp_counts, (2, 3, 4, 6), ways)
    for bn, bk, warps, stages, whole in forms:
        stage = bn * bk * 2 * (1 + (role == "gated")) + 16 * bk * (4 if fused else 2)
        if stage * (stages - 1) <= MOST_SHARED_BYTES and stages <= -(-k // bk) + 1:
            found.append(Tile(bn, bk, warps, stages, whole=whole))
    return found


def runner(job: Job, tile: Tile, weights: list[torch.Tensor]) -> Any:
    role, n, k = job
    fused = role != "add" and k <= FUSED_NORM_DEPTH
    x = normal(ROWS, k, dtype=torch.float32 if fused else torch.bfloat16)
    scales = normal(ROWS, dtype=torch.float32)
    norm = gemm.Norm(normal(k, dtype=torch.float32), scales, EPS, False) if fused else None
    inner = n // 2 if role == "gated" else n
    out = normal(ROWS, inner, dtype=torch.float32 if role == "add" else torch.bfloat16)

    def body() -> None:
        for i in range(CALLS):
            w = weights[i % len(weights)]
            gemm.launch(x, w, None, out, tile, norm, None, role == "gated", role == "add")

    return body


def _compile(part: list[tuple[Job, Tile]]) -> None:
    for job, tile in part:
        try:
            runner(job, tile, [weight(job[1], job[2])])()
        except Exception as error:  # a tile that does not compile or fit is only left out
            print(f"{job} {tile}: {type(error).__name__}")
    torch.cuda.synchronize()


def run_sweep(only: str = "") -> list[dict[str, Any]]:
    """`only`: of the products whose line contains this, such as `norm 960`."""
    chosen = [job for job in jobs() if only in f"{job[0]} {job[1]} x {job[2]}"]
    tried = {job: tiles(*job) for job in chosen}
    work = [(job, tile) for job, some in tried.items() for tile in some]
    count = max(1, min(14, (os.cpu_count() or 2) - 2))
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        pool.map(_compile, [work[i::count] for i in range(count)], chunksize=1)
    print(f"{len(work)} tiles compiled", flush=True)
    found = []
    for (role, n, k), some in tried.items():
        copies = min(-(-COLD_BYTES // (2 * n * k)), CALLS)
        weights = [weight(n, k) for _ in range(copies)]
        timed = []
        for tile in some:
            try:
                us = replay_us(runner((role, n, k), tile, weights), 7) / CALLS
            except Exception:  # reported when it was compiled
                continue
            timed.append((us, tile))
        timed.sort(key=lambda pair: pair[0])
        columns = n // 2 if role == "gated" else n
        own = tile_of(columns, k, torch.bfloat16, role != "add", role == "gated")
        now = next((us for us, tile in timed if tile == own), None)
        print(f"{role} {n} x {k}: now {own} {now and round(now, 2)}", flush=True)
        for us, tile in timed[:SHOWN]:
            print(f"   {us:8.2f} us {tile}")
        best = [{"us": us, "tile": str(tile)} for us, tile in timed[:SHOWN]]
        found.append({"role": role, "n": n, "k": k, "best": best, "now_us": now})
    return found
