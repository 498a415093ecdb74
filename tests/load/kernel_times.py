"""Times of single operators and of whole chains of layers, by CUDA-graph replay."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.triton import ops
from engine.kernels.triton.tiles import WIDE
from engine.models.rope import Rope, rope_tables
from tests.load.kernel_shapes import EPS, SHAPES, Shape, normal, weight

BATCHES = (1, 8, 64, 512)
CALLS = 12  # in one graph
COLD_BYTES = 256 << 20  # of weights: several times the L2 cache


def replay_us(body: Callable[[], Any], replays: int = 15) -> float:
    """Median time of one replay of the captured body, in microseconds."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        body()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    graph.replay()
    times = []
    for _ in range(replays):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) * 1e3)
    return statistics.median(times)


def bandwidth() -> float:
    """Bytes per microsecond of a copy, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    to = torch.empty_like(source)
    return 2 * source.numel() / replay_us(lambda: to.copy_(source))


def per_call_us(call: Callable[[Tensor], Any], weights: list[Tensor]) -> float:
    """Time of one call among many with changing weights."""

    def body() -> None:
        for i in range(CALLS):
            call(weights[i % len(weights)])

    return replay_us(body) / CALLS


def _product(name: str, shape: Shape, rows: int, k: int) -> Callable[[Tensor], Any]:
    """The operator that a weight belongs to."""
    if name in ("qkv", "gate_up"):
        stream, scale = normal(rows, k, dtype=torch.float32), normal(k, dtype=torch.float32)
        run = ops.norm_linear if name == "qkv" else ops.norm_gate_up
        return lambda w: run(stream, scale, EPS, w, wide=WIDE)
    x, residual = normal(rows, k), normal(rows, shape.hidden, dtype=torch.float32)
    return lambda w: ops.linear_add(x, w, None, residual, wide=WIDE)


def time_products(shape: Shape, rate: float) -> list[dict[str, Any]]:
    found = []
    for name, (n, k) in shape.products().items():
        size = 2 * n * k
        weights = [weight(n, k) for _ in range(min(-(-COLD_BYTES // size), CALLS))]
        for rows in BATCHES:
            x = normal(rows, k)
            ours = per_call_us(_product(name, shape, rows, k), weights)
            plain = per_call_us(lambda w, x=x: F.linear(x, w), weights)
            found.append(row(shape, name, rows, ours, plain, size / rate))
    return found


def row(
    shape: Shape, name: str, rows: int, ours: float, plain: float | None, floor: float
) -> dict[str, Any]:
    line = {"shape": shape.name, "name": name, "rows": rows, "us": round(ours, 2)}
    line |= {"cublas_us": plain and round(plain, 2), "floor_us": round(floor, 2)}
    beside = "" if plain is None else f"cublas {plain:8.2f}"
    print(
        f"{shape.name:13} {name:10} M {rows:4} {ours:9.2f} us  {beside}  floor {floor:8.2f}"
        f"  x {ours / floor:.2f}",
        flush=True,
    )
    return line


def time_ends(shape: Shape, rate: float) -> list[dict[str, Any]]:
    """The head over the whole vocabulary, and drawing from its logits."""
    found = []
    size = 2 * shape.vocab * shape.hidden
    heads = [weight(shape.vocab, shape.hidden) for _ in range(-(-COLD_BYTES // size))]
    scale = normal(shape.hidden, dtype=torch.float32)
    for rows in (1, 8, 64):
        stream = normal(rows, shape.hidden, dtype=torch.float32)
        index = torch.arange(rows, device="cuda")
        us = per_call_us(lambda w, s=stream, i=index: ops.head(s, i, scale, EPS, w), heads)
        x = normal(rows, shape.hidden)
        plain = per_call_us(lambda w, x=x: F.linear(x, w), heads)
        found.append(row(shape, "head", rows, us, plain, size / rate))
        logits = normal(rows, shape.vocab, dtype=torch.float32, scale=3.0)
        zeros = torch.zeros(rows, device="cuda")
        keys = zeros + 0.8, index, index % 2, index
        sets = {
            "greedy": ops.DrawRows(zeros, *keys[1:]),
            "sampled": ops.DrawRows(*keys),
            "filtered": ops.DrawRows(*keys, zeros, (index * 0 + 20).int(), zeros + 0.95),
        }
        for name, how in sets.items():
            us = replay_us(lambda g=logits, h=how: ops.draw(g, h))
            found.append(row(shape, name, rows, us, None, logits.nbytes / rate))
    return found


class Chain:
    """A whole step but for the attention: embedding, layers, head and draw on random weights."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.layers = [
            {name: weight(*form) for name, form in shape.products().items()}
            for _ in range(shape.layers)
        ]
        self.norm = normal(shape.hidden, dtype=torch.float32)
        head_norm = normal(shape.head_dim, dtype=torch.float32)
        self.norms = (head_norm, head_norm) if shape.head_norms else None
        self.table = weight(shape.vocab, shape.hidden)
        self.cos, self.sin = (t.cuda() for t in rope_tables(Rope(1e6, 4096), shape.head_dim, 4096))
        form = (2, 128, 16, shape.kv_heads, shape.head_dim)
        self.k, self.v = torch.zeros(form, dtype=torch.bfloat16, device="cuda")

    @property
    def weight_bytes(self) -> int:
        return self.table.nbytes + sum(w.nbytes for layer in self.layers for w in layer.values())

    def step(self, ids: Tensor, positions: Tensor) -> Tensor:
        stream = ops.embed(ids, self.table)
        width = self.shape.heads * self.shape.head_dim
        for layer in self.layers:
            q = ops.norm_qkv_store(
                stream, self.norm, EPS, layer["qkv"], None, self.norms, self.cos, self.sin,
                positions, self.k, self.v, positions, WIDE,
            )  # fmt: skip
            ops.linear_add(q.view(-1, width), layer["out"], None, stream, wide=WIDE)
            inner = ops.norm_gate_up(stream, self.norm, EPS, layer["gate_up"], wide=WIDE)
            ops.linear_add(inner, layer["down"], None, stream, wide=WIDE)
        logits = ops.head(stream, None, self.norm, EPS, self.table, WIDE)
        return ops.draw(logits, ops.DrawRows(stream[:, 0] * 0, ids, ids, ids))


def time_chain(shape: Shape, rate: float) -> list[dict[str, Any]]:
    """Each with plain launches and, as `dependent`, with launches that begin early; both draw the
    same tokens.
    """
    chain, found = Chain(shape), []
    for rows in (1, 8, 16, 64, 256, 1024):
        ids = torch.randint(0, shape.vocab, (rows,), device="cuda")
        positions = torch.arange(rows, device="cuda")
        drawn = []
        for name, early in (("chain", False), ("dependent", True)):
            ops.use_dependent_launch(early)
            tokens = torch.empty_like(ids)
            body = lambda i=ids, p=positions, t=tokens: t.copy_(chain.step(i, p))  # noqa: E731
            us = replay_us(body)
            drawn.append(tokens)
            found.append(row(shape, name, rows, us, None, chain.weight_bytes / rate))
        ops.use_dependent_launch(True)
        assert torch.equal(*drawn), "launching early must not change a bit"
    return found


def run_times() -> dict[str, Any]:
    rate = bandwidth()
    print(f"copy: {rate / 1e6:.2f} TB/s")
    times = []
    for shape in SHAPES:
        times += time_chain(shape, rate)
        times += time_products(shape, rate)
        times += time_ends(shape, rate)
        torch.cuda.empty_cache()
    return {"copy_bytes_per_us": rate, "times": times}
