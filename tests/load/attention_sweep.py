"""Tiles of TRITON_ATTN at the points where it is slowest beside others. Keys, chunk and warps are
part of a row's bits and must be one choice for a model; rows, stages and programs are free.

Tiles are compiled by processes side by side, which leave the results in Triton's cache.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from engine.attention.few_rows import FEW
from engine.attention.kernels.schedule import Tiles, tiles_for
from tests.load.attention_times import (
    SHAPES,
    Point,
    Run,
    Setting,
    Shape,
    peers_of,
    timed,
    triton_run,
)

SAMPLES = 5
# (width, context, batch)
WHERE = (
    (1, 1024, 1), (1, 1024, 32), (1, 4096, 8), (1, 8192, 8), (1, 32768, 1), (1, 32768, 8),
    (1, 32768, 32), (8, 1024, 32), (8, 8192, 8), (8, 32768, 1), (8, 32768, 8),
)  # fmt: skip
# (keys, chunk, warps) by the width of a head
NARROW = ((128, 8, 4), (64, 16, 4), (64, 16, 2), (64, 8, 1))
WIDE = ((64, 16, 4), (64, 8, 4), (64, 16, 2), (32, 16, 2))


@dataclass(frozen=True, slots=True)
class Variant:
    tiles: Tiles
    few_rows: int

    @property
    def bits(self) -> tuple[int, int, int]:
        return self.tiles.keys, self.tiles.chunk, self.tiles.warps

    def __str__(self) -> str:
        tiles, own = self.tiles, "x".join(map(str, self.bits[:2]))
        free = f"stages {tiles.stages} programs {tiles.programs} rows {self.few_rows}/{tiles.rows}"
        return f"{own} warps {tiles.warps} {free}"


def variants(shape: Shape) -> list[Variant]:
    """First what is chosen but for tiles of few rows, then others with them."""
    chosen = tiles_for(shape.heads // shape.kv_heads, shape.dim, True)
    found = [Variant(chosen, chosen.rows)]
    for keys, chunk, warps in NARROW if shape.dim <= 64 else WIDE:
        free = [(5, 8), (5, 4), (3, 8) if warps >= 4 else (5, 16)]
        found += [Variant(Tiles(32, keys, chunk, warps, *pair), FEW) for pair in free]
    return found


def _compile(part: list[tuple[Shape, Variant, int]]) -> list[str]:
    """What could not be built, and where tiles of few rows do not give the bits of many."""
    wrong = []
    for shape, variant, page in part:
        tiles, name = variant.tiles, f"{shape.name} {variant}"
        try:
            context = 3 * tiles.keys * tiles.chunk - 5
            for width in (1, 8):
                setting = Setting(Point(shape, width, context, 2), page, layers=1)
                few = triton_run(setting, tiles, variant.few_rows)(0)
                if width == 1 and not torch.equal(few, triton_run(setting, tiles, tiles.rows)(0)):
                    wrong.append(f"{name}: not the same bits as tiles of {tiles.rows} rows")
        except Exception as error:  # such a variant is only left out
            wrong.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
    return wrong


def _time(make: Callable[[], Run], layers: int) -> float:
    try:
        return timed(make(), layers, SAMPLES)
    except Exception as error:  # one that cannot run must not end the comparison
        print(f"  left out: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        return math.inf


def _at(point: Point, page: int, flashinfer: bool) -> tuple[dict[Variant, float], float]:
    """Microseconds of every variant and of the best peer; prints them, the best last."""
    setting = Setting(point, page)
    peers = {
        name: _time(make, setting.layers) for name, make in peers_of(setting, flashinfer).items()
    }
    ours = {
        variant: _time(
            partial(triton_run, setting, variant.tiles, variant.few_rows), setting.layers
        )
        for variant in variants(point.shape)
    }
    best = min(peers.values())
    floor = point.bytes / 4.3e6
    print(
        f"{point.shape.name} width {point.width} context {point.context} batch {point.batch}:",
        end="",
    )
    print(f" {floor:.1f} us at 4.3 TB/s;", ", ".join(f"{n} {us:.1f}" for n, us in peers.items()))
    ranked = sorted(ours, key=lambda variant: ours[variant], reverse=True)
    for variant in [*list(ours)[:1], *ranked[-6:]]:
        us = ours[variant]
        print(f"  {us:7.1f} us {us / best:.2f} x  {variant}", flush=True)
    return ours, best


def _sums(title: str, scores: dict[str, list[float]], shown: int) -> None:
    """Ratios to the best peer at all points, the lowest worst one last."""
    print(title)
    ranked = sorted(scores, key=lambda name: (max(scores[name]), _mean(scores[name])), reverse=True)
    for name in ranked[-shown:]:
        text = " ".join(f"{ratio:.2f}" for ratio in scores[name])
        print(f"  worst {max(scores[name]):.2f} mean {_mean(scores[name]):.2f} = {text}  {name}")


def _mean(scores: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(score) for score in scores))


def run(only: str, page: int, flashinfer: bool, workers: int) -> list[dict[str, Any]]:
    begun, results = time.monotonic(), []
    shapes = [shape for shape in SHAPES if only in shape.name]
    work = [(shape, variant, page) for shape in shapes for variant in variants(shape)]
    # Programs change nothing that is compiled: the same kernels stand side by side in one part.
    kernels = sorted({(s.name, v.bits, v.tiles.stages) for s, v, _ in work})
    parts: list[list[tuple[Shape, Variant, int]]] = [[] for _ in range(workers)]
    for item in work:
        number = kernels.index((item[0].name, item[1].bits, item[1].tiles.stages))
        parts[number % workers].append(item)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for wrong in pool.imap_unordered(_compile, parts, chunksize=1):
            print("\n".join(wrong), end="\n" * bool(wrong))
    print(f"{len(work)} variants built, {time.monotonic() - begun:.0f} s", flush=True)
    for shape in shapes:
        ratios: dict[Variant, list[float]] = {}
        for where in WHERE:
            point = Point(shape, *where)
            ours, best = _at(point, page, flashinfer)
            torch.cuda.empty_cache()
            for variant, us in ours.items():
                ratios.setdefault(variant, []).append(us / best)
            results.append(
                asdict(point) | {"best_peer": best, "us": {str(v): us for v, us in ours.items()}}
            )
        own: dict[tuple[int, int, int], list[list[float]]] = {}
        for variant, found in ratios.items():
            own.setdefault(variant.bits, []).append(found)
        free = {
            "{}x{} warps {}".format(*bits): [min(at) for at in zip(*found, strict=True)]
            for bits, found in own.items()
        }
        print(f"{shape.name}: time over the best peer's at {WHERE}")
        _sums("one choice for all points:", {str(v): found for v, found in ratios.items()}, 12)
        _sums("stages, programs and rows chosen for each point:", free, len(free))
        print(f"{time.monotonic() - begun:.0f} s", flush=True)
    return results
