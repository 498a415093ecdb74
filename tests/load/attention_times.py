"""Times of attention by CUDA-graph replay; every run reads other keys, as a model's layers do."""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.attention.base import LayerMode, Span
from engine.attention.kernels.schedule import Tiles, tiles_for
from engine.attention.triton_attn import TritonAttention
from engine.kv.cache import KVCache, KVGeometry
from engine.kv.pool import PagePool
from tests.engine.attention_parts import cut, sizes

DTYPE = torch.bfloat16
ROTATED_BYTES = 256 << 20  # more than the L2 cache holds
Run = Callable[[int], Tensor]  # layer -> output
_PARTS, _MOST_PARTS = "parts of ", 1024


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    heads: int
    kv_heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class Point:
    shape: Shape
    width: int
    context: int
    batch: int

    @property
    def bytes(self) -> int:
        """Of the keys and values that one run reads."""
        return 2 * self.batch * self.context * self.shape.kv_heads * self.shape.dim * 2


SHAPES = (Shape("SmolLM2-135M", 9, 3, 64), Shape("Qwen3-8B", 32, 8, 128))
POINTS = [
    Point(shape, width, context, batch)
    for shape in SHAPES
    for width in (1, 8)
    for context in (1024, 4096, 8192, 32768)
    for batch in (1, 8, 32)
]


class Setting:
    """Cache, spans and queries of one point; `layers` caches of it in turn, 0 for enough of them
    to read every one from memory."""

    def __init__(self, point: Point, page: int, layers: int = 0, device: str = "cuda") -> None:
        shape = point.shape
        self.point, self.page = point, page
        self.layers = layers or min(max(math.ceil(ROTATED_BYTES / point.bytes), 4), 128)
        pool = PagePool(point.batch * -(-point.context // page), page)
        geometry = KVGeometry(self.layers, shape.kv_heads, shape.dim, page, DTYPE)
        self.cache = KVCache(geometry, pool.page_count, device)
        for tensor in (*self.cache.k, *self.cache.v):
            tensor.normal_()
        start, order = point.context - point.width, torch.randperm(pool.page_count).tolist()
        self.spans = []
        for index in range(point.batch):
            table = pool.allocate(point.context)
            table.pages = [order.pop() for _ in table.pages]
            self.spans.append(Span(table, start, index * point.width, point.width))
        rows = point.batch * point.width
        self.q = torch.randn(self.layers, rows, shape.heads, shape.dim, device=device, dtype=DTYPE)

    def contiguous(self) -> list[tuple[Tensor, Tensor]]:
        """K and V of every layer without pages, [batch, context, kv_heads, dim]."""
        pages = torch.tensor([span.table.pages for span in self.spans], device=self.q.device)
        both = zip(self.cache.k, self.cache.v, strict=True)
        return [(k[pages].flatten(1, 2), v[pages].flatten(1, 2)) for k, v in both]


def triton_run(
    setting: Setting, tiles: Tiles | None = None, few_rows: int = 0, part: int = 0
) -> Run:
    """`part`: keys of a part, where the schedule is not to choose."""
    point = setting.point
    modes = [LayerMode()] * setting.layers
    backend = TritonAttention(
        setting.cache, point.shape.heads, modes, DTYPE, tiles, few_rows=few_rows
    )
    if part:
        cut(backend, part)
    pages, batch = -(-point.context // setting.page), point.batch
    host = torch.empty(backend.words(batch, batch * point.width, pages), dtype=torch.int32)
    backend.fill(host.numpy(), setting.spans, batch, pages)
    plan = backend.view(host.to(setting.q.device), batch, pages, point.width)
    return lambda layer: backend.run(plan, layer, setting.q[layer])


def flashinfer_run(setting: Setting, kernel: str) -> Run:
    """fa2, fa3: the prefill wrapper; decode: the decode wrapper (width 1)."""
    import flashinfer

    point, shape, page = setting.point, setting.point.shape, setting.page
    held = -(-point.context // page)
    rows = torch.arange(point.batch + 1, dtype=torch.int32)
    pages = [number for span in setting.spans for number in span.table.pages]
    last = torch.full((point.batch,), point.context - (held - 1) * page, dtype=torch.int32)
    words = rows * held, torch.tensor(pages, dtype=torch.int32), last
    space = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    heads = shape.heads, shape.kv_heads, shape.dim, page
    if kernel == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(space, "NHD")
        wrapper.plan(*words, *heads, q_data_type=DTYPE, kv_data_type=DTYPE)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend=kernel)
        wrapper.plan(
            rows * point.width, *words, *heads, causal=True, q_data_type=DTYPE, kv_data_type=DTYPE
        )
    cache = setting.cache
    return lambda layer: wrapper.run(setting.q[layer], (cache.k[layer], cache.v[layer]))


def flash_run(setting: Setting) -> Run:
    """FlashAttention of torch over keys that were gathered beforehand, causal."""
    point, keys = setting.point, setting.contiguous()
    q = setting.q.unflatten(1, (point.batch, point.width))

    def run(layer: int) -> Tensor:
        return torch.ops.aten._flash_attention_forward(
            q[layer], *keys[layer], None, None, point.width, point.context, 0.0, True, False
        )[0]

    return run


def sdpa_run(setting: Setting) -> Run:
    """torch's scaled_dot_product_attention; without a mask, which costs it nothing."""
    point, keys = setting.point, setting.contiguous()
    q = setting.q.unflatten(1, (point.batch, point.width)).transpose(2, 3)
    attend = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)

    def run(layer: int) -> Tensor:
        k, v = (x.transpose(1, 2) for x in keys[layer])
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return attend(q[layer], k, v)

    return run


def peers_of(setting: Setting, flashinfer: bool) -> dict[str, Callable[[], Run]]:
    """The others at this point; FlashInfer compiles its kernels for minutes."""
    found: dict[str, Callable[[], Run]] = {}
    if flashinfer and importlib.util.find_spec("flashinfer"):
        kernels = ["fa2", "fa3"] + ["decode"] * (setting.point.width == 1)
        found |= {f"flashinfer {name}": partial(flashinfer_run, setting, name) for name in kernels}
    return found | {"flash": partial(flash_run, setting), "sdpa": partial(sdpa_run, setting)}


def timed(run: Run, layers: int, samples: int = 7) -> float:
    """Microseconds of one run: the median of replays of a graph of one run a layer."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for layer in range(min(layers, 3)):
            run(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            run(layer)
    graph.replay()
    found = []
    for _ in range(samples):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / layers)
    return statistics.median(found)


def bandwidth() -> float:
    """Bytes a second that a copy moves, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    to = torch.empty_like(source)
    us = timed(lambda _: to.copy_(source), 8)
    return 2 * source.numel() / us * 1e6


def part_runs(setting: Setting) -> dict[str, Callable[[], Run]]:
    """With keys cut in parts of one size, whatever the schedule would choose; not where there would
    be more than a few for each place on the device."""
    point, shape = setting.point, setting.point.shape
    tiles = tiles_for(shape.heads // shape.kv_heads, shape.dim, True)
    found: dict[str, Callable[[], Run]] = {}
    for keys in sizes(tiles).values():
        if keys and keys < point.context and point.batch * point.context // keys <= _MOST_PARTS:
            found[f"{_PARTS}{keys}"] = partial(triton_run, setting, part=keys)
    return found


def run(only: str, page: int, flashinfer: bool, parts: bool = False) -> dict[str, Any]:
    rate = bandwidth()
    names: tuple[str | None, ...] = (
        torch.cuda.get_device_name(),
        torch.__version__,
        torch.version.cuda,
    )
    print(f"{' / '.join(names)}; a copy moves {rate / 1e12:.2f} TB/s; page {page}")
    print(f"{'shape':14}{'width':>6}{'context':>8}{'batch':>6}{'floor us':>9}  us (x floor)")
    rows, ratios = [], []
    for point in POINTS:
        if only not in point.shape.name:
            continue
        setting, floor, found = Setting(point, page), point.bytes / rate * 1e6, {}
        runs = {"TRITON_ATTN": partial(triton_run, setting)} | peers_of(setting, flashinfer)
        runs |= part_runs(setting) if parts else {}
        for name, make in runs.items():
            try:
                found[name] = timed(make(), setting.layers)
            except Exception as error:  # a peer that cannot run must not end the comparison
                print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
        text = "  ".join(f"{name} {us:.1f} ({us / floor:.2f})" for name, us in found.items())
        peers = [us for name, us in found.items() if not name.startswith(("TRITON", _PARTS))]
        ratio = found.get("TRITON_ATTN", math.inf) / min(peers, default=math.nan)
        ratios.append(ratio)
        where = f"{point.shape.name:14}{point.width:>6}{point.context:>8}{point.batch:>6}"
        print(f"{where}{floor:>9.1f}  {text}  ours/best {ratio:.2f}", flush=True)
        rows.append(asdict(point) | {"floor_us": floor, "us": found, "over_best": ratio})
        del setting
        torch.cuda.empty_cache()
    if ratios:
        print(f"ours/best: median {statistics.median(ratios):.2f}, worst {max(ratios):.2f}")
    else:
        print(f"no shape has {only!r} in its name; there are {[shape.name for shape in SHAPES]}")
    versions = {"device": names[0], "torch": names[1], "cuda": names[2], "bytes_per_s": rate}
    return versions | {"page_tokens": page, "points": rows}
