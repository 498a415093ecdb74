"""Errors of every operator at real sizes, and the bits of a row alone and among others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from engine.kernels.triton import ops
from engine.kernels.triton import reference as ref
from engine.kernels.triton.tiles import WIDE, Wide
from engine.models.rope import Rope, rope_tables
from tests.load.kernel_shapes import EPS, SHAPES, Shape, normal, weight

LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
BATCHES = (1, 2, 7, 8, 15, 16, 17, 32, 33)

# Some rows [first, first + count) through an operator.
Some = Callable[[int, int], Tensor]


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def independent(run: Some, rows: int) -> bool:
    """Whether each row has the same bits in every batch, in the first, middle and last place."""
    whole = run(0, rows)
    for batch in BATCHES:
        for first in {0, (rows - batch) // 2, rows - batch}:
            if not torch.equal(run(first, batch), whole[first : first + batch]):
                return False
    return True


def _products(shape: Shape, dtype: torch.dtype) -> Iterator[tuple[str, Some, Tensor]]:
    """Name, operator over 33 rows, and what it should give in fp64."""
    rows = 33
    stream = normal(rows, shape.hidden, dtype=torch.float32, scale=20.0)
    scale = normal(shape.hidden, dtype=torch.float32)
    exact = stream.double()
    n, k = shape.products()["qkv"]
    w, bias = weight(n, k).to(dtype), normal(n).to(dtype)
    wanted = ref.norm_linear_ref(exact, scale, EPS, w, bias)
    yield (
        "norm_linear",
        lambda f, c: ops.norm_linear(stream[f : f + c], scale, EPS, w, bias),
        wanted,
    )
    n, k = shape.products()["gate_up"]
    both = weight(n, k).to(dtype)
    wanted = ref.norm_gate_up_ref(exact, scale, EPS, both)
    yield "norm_gate_up", lambda f, c: ops.norm_gate_up(stream[f : f + c], scale, EPS, both), wanted
    n, k = shape.products()["down"]
    down, x = weight(n, k).to(dtype), normal(rows, k).to(dtype)

    def added(first: int, count: int) -> Tensor:
        out = stream[first : first + count].clone()
        ops.linear_add(x[first : first + count], down, None, out)
        return out

    yield "linear_add", added, exact + ref.linear_ref(x.double(), down)
    yield (
        "linear",
        lambda f, c: ops.linear(x[f : f + c], down, None, torch.float32),
        ref.linear_ref(x.double(), down),
    )
    head = weight(16384, shape.hidden).to(dtype)
    index = torch.randint(0, rows, (rows,), device="cuda")
    wanted = ref.norm_linear_ref(exact[index], scale, EPS, head)
    yield "head", lambda f, c: ops.head(stream, index[f : f + c], scale, EPS, head), wanted


def _stores(shape: Shape, cache: torch.dtype) -> Iterator[tuple[str, float]]:
    rows, dim, page, layers = 33, shape.head_dim, 16, 2
    cos, sin = (t.cuda() for t in rope_tables(Rope(1e6, 4096), dim, 4096))
    positions = torch.randint(0, 4096, (rows,), device="cuda", dtype=torch.int32)
    slots = torch.randperm(40 * page, device="cuda")[:rows].int()
    slots[5] = -1
    norms = normal(dim, dtype=torch.float32), normal(dim, dtype=torch.float32)
    qkv = normal(rows, shape.qkv)
    form = (layers, 2, 40, page, shape.kv_heads, dim)
    got, wanted = (torch.zeros(form, device="cuda").to(cache) for _ in range(2))
    some = norms if shape.head_norms else None
    q = ops.qkv_store(qkv, some, EPS, cos, sin, positions, got[0, 0], got[0, 1], slots)
    exact = ref.qkv_store_ref(
        qkv.double(), some, EPS, cos, sin, positions, wanted[0, 0], wanted[0, 1], slots
    )
    yield f"qkv_store {cache} q", error(q, exact)
    yield f"qkv_store {cache} cache", error(got.float(), wanted.double())
    kv = normal(rows, layers * 2 * shape.kv_heads * dim)
    scales = normal(layers, dim, dtype=torch.float32)
    ops.context_store(kv, scales, EPS, cos, sin, positions, got, slots)
    ref.context_store_ref(kv.double(), scales, EPS, cos, sin, positions, wanted, slots)
    yield f"context_store {cache}", error(got.float(), wanted.double())


def _crowds(shape: Shape) -> Iterator[tuple[str, bool]]:
    """Whether rows have the bits among hundreds, in the larger tiles, that they have in blocks of
    8; of everything between a layer's residual stream and the next one's."""
    rows, dim, some = 1030, shape.head_dim, torch.bfloat16
    stream = normal(rows, shape.hidden, dtype=torch.float32, scale=20.0)
    scale = normal(shape.hidden, dtype=torch.float32)
    weights = {name: weight(*form) for name, form in shape.products().items()}
    weights["head"] = weight(16384, shape.hidden)
    heads, inner = normal(rows, shape.heads * dim), normal(rows, shape.inner)
    cos, sin = (t.cuda() for t in rope_tables(Rope(1e6, 4096), dim, 4096))
    numbers = torch.arange(rows, device="cuda", dtype=torch.int32)
    cache = torch.zeros(2, 70, 16, shape.kv_heads, dim, dtype=some, device="cuda")
    norms = (scale[:dim], scale[:dim]) if shape.head_norms else None

    def qkv(f: int, c: int, wide: Wide) -> Tensor:
        at = numbers[f : f + c]
        q = ops.norm_qkv_store(
            stream[f : f + c], scale, EPS, weights["qkv"], None, norms, cos, sin, at, *cache, at,
            wide,
        )  # fmt: skip
        kept = cache.view(2, -1, shape.kv_heads * dim)[:, f : f + c]
        return torch.cat([q.flatten(1), *kept], 1)

    def added(x: Tensor, w: Tensor) -> Callable[[int, int, Wide], Tensor]:
        def run(f: int, c: int, wide: Wide) -> Tensor:
            out = stream[f : f + c].clone()
            ops.linear_add(x[f : f + c], w, None, out, wide=wide)
            return out

        return run

    runs: dict[str, Callable[[int, int, Wide], Tensor]] = {
        "norm_qkv_store": qkv,
        "out": added(heads, weights["out"]),
        "norm_gate_up": lambda f, c, wide: ops.norm_gate_up(
            stream[f : f + c], scale, EPS, weights["gate_up"], wide=wide
        ),
        "down": added(inner, weights["down"]),
        "head": lambda f, c, wide: ops.head(
            stream[f : f + c], None, scale, EPS, weights["head"], wide
        ),
    }
    for name, run in runs.items():
        wanted = torch.cat([run(f, min(8, rows - f), ()) for f in range(0, rows, 8)])
        for count in (72, 136, 264, rows):
            first = rows - count
            same = torch.equal(run(first, count, WIDE), wanted[first:])
            yield f"{name}: {count} rows have the bits of blocks of 8", same


def _draws(shape: Shape) -> Iterator[tuple[str, bool]]:
    rows = 12
    logits = normal(rows, shape.vocab, dtype=torch.float32, scale=3.0)
    numbers = torch.arange(rows, device="cuda")
    keys = (numbers % 3 * 0.6).float(), numbers * 977 + 5, numbers % 2, numbers * 31
    free = ops.DrawRows(*keys)
    drawn = ops.draw(logits, free)
    yield "draw equals the host's", drawn.tolist() == ref.draw_ref(logits, free)
    steep = ops.DrawRows(
        *keys,
        min_p=(numbers % 4 * 0.02).float(),
        top_k=(numbers % 5 * 11).int(),
        top_p=(1 - numbers % 3 * 0.2).float(),
    )
    kept = ops.draw(logits, steep)
    yield "filtered draw equals the host's", kept.tolist() == ref.draw_ref(logits, steep)
    one = ops.DrawRows(*(None if t is None else t[7:8] for t in _fields(steep)))
    yield (
        "a row draws alone what it draws among others",
        bool(ops.draw(logits[7:8], one)[0] == kept[7]),
    )


def _fields(rows: ops.DrawRows) -> list[Tensor | None]:
    names = ("temperature", "seed", "choice", "index", "min_p", "top_k", "top_p")
    return [getattr(rows, name) for name in names]


def run_checks() -> dict[str, Any]:
    """Prints a line a check; the names of those that failed stand under `failed`."""
    checks: dict[str, float | bool] = {}
    failed: list[str] = []

    def note(name: str, value: float | bool, fine: bool) -> None:
        checks[name] = value
        print(f"{'ok  ' if fine else 'FAIL'} {name}: {value}", flush=True)
        if not fine:
            failed.append(name)

    for shape in SHAPES:
        for dtype, limit in LIMITS.items():
            if dtype == torch.float32 and shape is not SHAPES[0]:
                continue  # fp32 products run without tensor cores
            for name, run, wanted in _products(shape, dtype):
                at = f"{shape.name} {name} {dtype}"
                found = error(run(0, 33), wanted)
                note(at, found, found <= limit)
                alone = independent(run, 33)
                note(f"{at} rows independent", alone, alone)
        for cache, limit in ((torch.bfloat16, 1e-2), (torch.float8_e4m3fn, 3e-2)):
            for name, found in _stores(shape, cache):
                note(f"{shape.name} {name}", found, found <= limit)
        for name, fine in (*_draws(shape), *_crowds(shape)):
            note(f"{shape.name} {name}", fine, fine)
    return {"checks": checks, "failed": failed}
