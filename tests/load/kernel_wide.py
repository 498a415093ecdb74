"""Products of many rows: tiles of few rows, each tile of many, what is chosen, and cuBLAS.

`=` behind a time: the bits are those of tiles of few rows; `!`: they are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.kernels.triton import ops, plain, tiles
from tests.load.kernel_shapes import EPS, SHAPES, Shape, normal, weight
from tests.load.kernel_times import CALLS, COLD_BYTES, replay_us

ROWS = (24, 32, 48, 64, 128, 256, 1024)

# Weight and tiles to a result.
Run = Callable[[Tensor, tiles.Wide], Tensor]


def _runs(shape: Shape, rows: int) -> dict[str, tuple[Run, Callable[[Tensor], Any]]]:
    """Ours and cuBLAS's, by the name of the weight."""
    hidden, inner = shape.hidden, shape.inner
    stream, scale = normal(rows, hidden, dtype=torch.float32), normal(hidden, dtype=torch.float32)
    x, deep = normal(rows, shape.heads * shape.head_dim), normal(rows, inner)
    residual = normal(rows, hidden, dtype=torch.float32)

    def added(w: Tensor, wide: tiles.Wide) -> Tensor:
        source = deep if w.shape[1] == inner else x
        ops.linear_add(source, w, None, residual, wide=wide)
        return residual

    def added_plain(w: Tensor) -> None:
        plain.linear_add(deep if w.shape[1] == inner else x, w, None, residual)

    return {
        "qkv": (
            lambda w, wide: ops.norm_linear(stream, scale, EPS, w, wide=wide),
            lambda w: plain.norm_linear(stream, scale, EPS, w),
        ),
        "out": (added, added_plain),
        "gate_up": (
            lambda w, wide: ops.norm_gate_up(stream, scale, EPS, w, wide=wide),
            lambda w: plain.norm_gate_up(stream, scale, EPS, w),
        ),
        "down": (added, added_plain),
        "head": (
            lambda w, wide: ops.head(stream, None, scale, EPS, w, wide),
            lambda w: plain.head(stream, None, scale, EPS, w),
        ),
    }


def _us(call: Callable[[Tensor], Any], weights: list[Tensor]) -> float:
    return replay_us(lambda: [call(weights[i % len(weights)]) for i in range(CALLS)], 5) / CALLS


def _equal(run: Run, w: Tensor, tile: tiles.Tile) -> bool:
    """From zeros on, where the product adds to something."""
    found = []
    for wide in ((), (tile,)):
        first = run(w, ())
        first.zero_()
        found.append(run(w, wide).clone())
    return torch.equal(*found)


def run_wide() -> list[dict[str, Any]]:
    found = []
    for shape in SHAPES:
        forms = shape.products() | {"head": (shape.vocab, shape.hidden)}
        for name, (n, k) in forms.items():
            weights = [weight(n, k) for _ in range(min(-(-COLD_BYTES // (2 * n * k)), 4))]
            for rows in ROWS:
                run, cublas = _runs(shape, rows)[name]
                line: dict[str, Any] = {"shape": shape.name, "name": name, "rows": rows}
                line["few"] = _us(lambda w, run=run: run(w, ()), weights)
                line["chosen"] = _us(lambda w, run=run: run(w, tiles.WIDE), weights)
                line["cublas"] = _us(cublas, weights)
                text = [f"{k} {line[k]:.1f}" for k in ("few", "chosen", "cublas")]
                for tile in tiles.WIDE:
                    try:
                        alone = replace(tile, fewest=1)
                        us = _us(lambda w, run=run, t=alone: run(w, (t,)), weights)
                        same = _equal(run, weights[0], alone)
                    except Exception as error:  # one tile must not hide the others
                        text.append(f"{tile.rows}x{tile.n}x{tile.k} {type(error).__name__}")
                        continue
                    text.append(f"{tile.rows}x{tile.n}x{tile.k} {us:.1f}{'=' if same else '!'}")
                    line[str(tile)] = [us, same]
                print(f"{shape.name:13}{name:8} M {rows:5} us  {'  '.join(text)}", flush=True)
                found.append(line)
            del weights
            torch.cuda.empty_cache()
    return found
