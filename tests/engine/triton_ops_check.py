"""Compares the Triton operators with their references on tiny sizes; run with TRITON_INTERPRET=1
where there is no GPU. Prints one line per check and fails by assertion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl

from engine.api import Sampling
from engine.draw_rows import draw_words, write_draws
from engine.kernels.cpu.reference import gumbel_argmax_ref
from engine.kernels.triton import gemm, ops, plain, tiles
from engine.kernels.triton import reference as ref
from engine.kernels.triton.noise import gumbel as gumbel_of
from engine.kernels.triton.noise import philox as philox_words
from engine.models.rope import Rope, rope_tables
from engine.noise import gumbel, philox
from engine.sampling import Draw
from engine.sampling import draw as draw_on_host
from tests.engine.interpreter import prepare

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-5
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


@triton.jit
def _noise(seed, choice, index, words, noise, GROUPS: tl.constexpr):
    lane = tl.arange(0, GROUPS)
    keys = tl.load(index), tl.load(choice), tl.load(seed)
    found = philox_words(lane.to(tl.uint32), keys[0], keys[1], keys[2])
    for word in tl.static_range(4):
        tl.store(words + word * GROUPS + lane, found[word].to(tl.int32, bitcast=True))
        tl.store(noise + word * GROUPS + lane, gumbel_of(found[word]))


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def ints(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def close(name: str, got: torch.Tensor, wanted: torch.Tensor, limit: float) -> None:
    assert got.shape == wanted.shape, (name, got.shape, wanted.shape)
    error = (got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12)
    print(f"{name}: {float(error):.2e}")
    assert float(error) < limit, (name, float(error))


def check_products(dtype: torch.dtype, k: int, n: int, rows: int, bias: bool) -> None:
    limit, at = LIMITS[dtype], f"{dtype} {rows} x {k} x {n}"
    x, w = rand(rows, k, dtype=dtype), rand(n, k, dtype=dtype)
    b = rand(n, dtype=dtype) if bias else None
    close(f"linear {at}", ops.linear(x, w, b), ref.linear_ref(x.double(), w, b), limit)
    wide = rand(rows, n + 5)  # a residual whose rows stand apart
    before, residual = wide.clone(), wide[:, :n]
    ops.linear_add(x, w, b, residual)
    wanted = before[:, :n].double() + ref.linear_ref(x.double(), w, b)
    close(f"linear_add {at}", residual, wanted, limit)
    assert torch.equal(wide[:, n:], before[:, n:])
    stream, scale = rand(rows, k) * 30, rand(k)
    got = ops.norm_linear(stream, scale, EPS, w, b)
    wanted = ref.norm_linear_ref(stream.double(), scale, EPS, w, b)
    close(f"norm_linear {at}", got, wanted, limit)
    assert got.dtype == dtype
    if n % 2 == 0:
        got = ops.norm_gate_up(stream, scale, EPS, w, b)
        wanted = ref.norm_gate_up_ref(stream.double(), scale, EPS, w, b)
        close(f"norm_gate_up {at}", got, wanted, 2 * limit)
    index = ints([rows - 1, 0, rows - 1], torch.int32)
    logits = ops.head(stream, index, scale, EPS, w)
    wanted = ref.norm_linear_ref(stream.double()[index.long()], scale, EPS, w)
    close(f"head {at}", logits, wanted, limit)
    assert logits.dtype == torch.float32


def same_bits(name: str, run: Callable[[int, int], torch.Tensor], rows: int) -> None:
    """`run(first, count)` on some rows gives the bits that all rows give."""
    whole = run(0, rows)
    for first, count in ((0, 1), (rows - 1, 1), (3, 5), (1, rows - 1)):
        part = run(first, count)
        assert torch.equal(part, whole[first : first + count]), (name, first, count)
    print(f"{name}: rows independent")


def check_rows(dtype: torch.dtype) -> None:
    rows, k, n = 21, 72, 40
    w, scale, b = rand(n, k, dtype=dtype), rand(k), rand(n, dtype=dtype)
    x, stream, residual = rand(rows, k, dtype=dtype), rand(rows, k), rand(rows, n)

    def added(first: int, count: int) -> torch.Tensor:
        out = residual[first : first + count].clone()
        ops.linear_add(x[first : first + count], w, b, out)
        return out

    same_bits("linear_add", added, rows)
    same_bits("norm_linear", lambda f, c: ops.norm_linear(stream[f : f + c], scale, EPS, w), rows)
    same_bits("norm_gate_up", lambda f, c: ops.norm_gate_up(stream[f : f + c], scale, EPS, w), rows)


def check_whole_blocks(dtype: torch.dtype) -> None:
    """Blocks of a weight fetched by one command; the last is cut off, in each half of two."""
    rows, k, n = 9, 88, 40
    x, w, halves = (rand(count, k, dtype=dtype) for count in (rows, n, 2 * n))
    norm = gemm.Norm(rand(k), torch.empty(rows, device=DEVICE), EPS, False)
    tile = tiles.Tile(n=16, k=32, warps=2, stages=3)
    for gated, weight in ((False, w), (True, halves)):
        for normed in (None, norm):
            made = []
            for whole in (False, True):
                out = torch.ones(rows, n, device=DEVICE)
                form = replace(tile, whole=whole)
                source = x if normed is None else x.float()
                gemm.launch(source, weight, None, out, form, normed, gated=gated, add=not gated)
                made.append(out)
            assert tiles.described(weight) == (dtype == torch.bfloat16)
            assert torch.equal(*made), f"whole blocks {dtype} {gated} {normed is None}"
    assert not tiles.described(w[:, 1:]), "rows of it begin anywhere"


def check_wide(dtype: torch.dtype) -> None:
    """Larger tiles for many rows, with the scales of a norm passed on."""
    rows, k, n, limit = 35, 40, 24, LIMITS[dtype]
    tile = (tiles.Tile(n=16, k=16, warps=4, stages=2, rows=32),)
    x, stream, scale = rand(rows, k, dtype=dtype), rand(rows, k) * 30, rand(k)
    w, b = rand(n, k, dtype=dtype), rand(n, dtype=dtype)
    fitting = [tiles.wide_tile(tile, count, n, False, dtype) for count in (rows, 17, 16)]
    many = tile[0] if dtype == torch.bfloat16 else None
    assert fitting == [many, many, None]
    runs: dict[str, Callable[[tiles.Wide], torch.Tensor]] = {
        "linear": lambda wide: ops.linear(x, w, b, wide=wide),
        "norm_linear": lambda wide: ops.norm_linear(stream, scale, EPS, w, b, wide=wide),
        "norm_gate_up": lambda wide: ops.norm_gate_up(stream, scale, EPS, w, b, wide=wide),
        "head": lambda wide: ops.head(stream, ints([*range(34, -1, -1)]), scale, EPS, w, wide),
    }
    for name, run in runs.items():
        close(f"wide {name} {dtype}", run(tile), run(()), limit / 10)
        if DEVICE == "cuda":
            assert torch.equal(run(tile), run(())), name
    added = [torch.ones(rows, n, device=DEVICE) for _ in "ab"]
    ops.linear_add(x, w, b, added[0], wide=tile)
    ops.linear_add(x, w, b, added[1])
    close(f"wide linear_add {dtype}", *added, limit / 10)


def check_deep() -> None:
    """Behind a certain depth the norm is a kernel of its own."""
    k = tiles.FUSED_NORM_DEPTH + 8
    stream, scale, w = rand(3, k), rand(k), rand(6, k)
    got = ops.norm_linear(stream, scale, EPS, w)
    close("norm_linear deep", got, ref.norm_linear_ref(stream.double(), scale, EPS, w), 1e-4)
    index = ints([2, 0])
    wanted = ref.norm_linear_ref(stream[[2, 0]].double(), scale, EPS, w)
    close("head deep", ops.head(stream, index, scale, EPS, w), wanted, 1e-4)
    table, ids = rand(50, 1100, dtype=torch.bfloat16), ints([4, 49, 0], torch.int32)
    assert torch.equal(ops.embed(ids, table), table[ids.long()].float())
    print("embed: ok")


def check_plain() -> None:
    """torch's own products give what the kernels give, to rounding."""
    x, stream, scale, w, b = rand(5, 32), rand(5, 32), rand(32), rand(24, 32), rand(24)
    close("plain linear", plain.linear(x, w, b), ops.linear(x, w, b), 1e-5)
    got = plain.norm_gate_up(stream, scale, EPS, w, b)
    close("plain norm_gate_up", got, ops.norm_gate_up(stream, scale, EPS, w, b), 1e-5)
    index = ints([3, 1])
    got = plain.head(stream, index, scale, EPS, w)
    close("plain head", got, ops.head(stream, index, scale, EPS, w), 1e-5)
    one, other = rand(5, 24), torch.empty(5, 24, device=DEVICE)
    other.copy_(one)
    plain.linear_add(x, w, b, one)
    ops.linear_add(x, w, b, other)
    close("plain linear_add", one, other, 1e-5)


def check_store(dtype: torch.dtype, cache: torch.dtype, dim: int, normed: bool) -> None:
    rows, heads, kv_heads, pages, page = 5, 6, 2, 4, 4
    cos, sin = (t.to(DEVICE) for t in rope_tables(Rope(500.0, 100), dim, 100))
    positions, slots = ints([0, 99, 7, 7, 3], torch.int32), ints([3, 15, 0, 8, -1], torch.int32)
    qkv = rand(rows, (heads + 2 * kv_heads) * dim + 3, dtype=dtype)[:, :-3]
    norms = (rand(dim), rand(dim)) if normed else None
    got, wanted = ([rand(pages, page, kv_heads, dim).to(cache) for _ in "kv"] for _ in range(2))
    for one, other in zip(got, wanted, strict=True):
        other.view(torch.uint8).copy_(one.view(torch.uint8))
    q = ops.qkv_store(qkv, norms, EPS, cos, sin, positions, *got, slots)
    exact = ref.qkv_store_ref(qkv.double(), norms, EPS, cos, sin, positions, *wanted, slots)
    # The interpreter cuts to fp8 where a GPU rounds: up to one part in eight.
    limit = max(LIMITS[dtype], {torch.float8_e4m3fn: 0.13, torch.bfloat16: 1e-2}.get(cache, 0))
    name = f"qkv_store {dtype} {cache} {dim} {normed}"
    close(name, q, exact, LIMITS[dtype])
    for one, other in zip(got, wanted, strict=True):
        close(f"{name} cache", one.float(), other.float(), limit)
    layers = 3
    kv = rand(rows, layers * 2 * kv_heads * dim, dtype=dtype)
    both = [torch.zeros(layers, 2, pages, page, kv_heads, dim, dtype=cache, device=DEVICE)]
    both.append(both[0].clone())
    scales = rand(layers, dim) if normed else None
    ops.context_store(kv, scales, EPS, cos, sin, positions, both[0], slots)
    ref.context_store_ref(kv.double(), scales, EPS, cos, sin, positions, both[1], slots)
    close(f"context_store {cache}", both[0].float(), both[1].float(), limit)


def check_qkv(dtype: torch.dtype, cache: torch.dtype, dim: int, normed: bool, rows: int) -> None:
    """The fused kernel against its parts, few rows and many."""
    heads, kv_heads, pages, page, k = 3, 1, 10, 4, 40
    n = (heads + 2 * kv_heads) * dim
    cos, sin = (t.to(DEVICE) for t in rope_tables(Rope(500.0, 100), dim, 100))
    positions = ints([7 * row % 100 for row in range(rows)], torch.int32)
    slots = ints([row if row % 5 else -1 for row in range(rows)], torch.int32)
    stream, scale = rand(rows, k) * 30, rand(k)
    w, b = rand(n, k, dtype=dtype), rand(n, dtype=dtype)
    norms = (rand(dim), rand(dim)) if normed else None
    tile = (tiles.Tile(n=16, k=16, warps=4, stages=2, rows=32),)
    made = []
    for run in ("parts", "fused", "many"):
        kv = [torch.zeros(pages, page, kv_heads, dim, device=DEVICE).to(cache) for _ in "kv"]
        rest = norms, EPS, cos, sin, positions, *kv, slots
        if run == "parts":
            q = ops.qkv_store(ops.norm_linear(stream, scale, EPS, w, b), *rest)
        else:
            rest = norms, *rest[2:]
            wide = tile if run == "many" else ()
            q = ops.norm_qkv_store(stream, scale, EPS, w, b, *rest, wide=wide)
        made.append((q, *kv))
    name, limit = f"qkv {dtype} {cache} {dim} {normed} {rows}", 0.1 if cache.itemsize == 1 else 1e-2
    for other in made[1:]:
        for got, wanted in zip(other, made[0], strict=True):
            close(name, got.float(), wanted.float(), limit)
    if DEVICE == "cuda":
        for got, wanted in zip(made[1], made[2], strict=True):
            assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)), name


def settings(rows: int, **changes: list[float]) -> ops.DrawRows:
    """Draws with seeds of 64 bits, at several temperatures; `changes` are the filters."""
    some = {name: torch.tensor(v * rows, device=DEVICE)[:rows] for name, v in changes.items()}
    if "top_k" in some:
        some["top_k"] = some["top_k"].int()
    return ops.DrawRows(
        temperature=torch.tensor([0.0, 0.7, 1.3] * rows, device=DEVICE)[:rows],
        seed=ints([(7919 * row + (row << 40)) * (-1) ** row for row in range(rows)]),
        choice=ints([row % 2 for row in range(rows)], torch.int32),
        index=ints([3 * row for row in range(rows)], torch.int32),
        **some,
    )


def check_noise() -> None:
    """The words are those of `engine.noise`, bit for bit; the logarithms may differ in the last."""
    groups = 64
    for seed, choice, index in ((0, 0, 0), (-(1 << 50) - 77, 3, 9001), ((1 << 63) - 1, 1, 1 << 31)):
        keys = [ints([value]) for value in (seed, choice, index)]
        words = torch.empty(4, groups, dtype=torch.int32, device=DEVICE)
        noise = torch.empty(4, groups, device=DEVICE)
        _noise[(1,)](*keys, words, noise, groups)
        counter = torch.zeros(groups, 4, dtype=torch.int64)
        counter[:, 0], counter[:, 1], counter[:, 2] = torch.arange(groups), index, choice
        wanted = philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
        assert torch.equal(words.T.long().cpu() & 0xFFFFFFFF, wanted)
        exact = gumbel(seed, choice, index, 4 * groups).view(groups, 4)
        torch.testing.assert_close(noise.T.cpu(), exact, rtol=2e-6, atol=2e-6)
    print("noise: ok")


def check_draw() -> None:
    rows, columns, vocab = 9, 2600, 2501
    logits = rand(rows, columns) * 2
    logits[:, vocab:] = 1e9  # padding that must never be drawn
    logits[0, 1700] = logits[0, 31] = logits[0, 32] = 40.0
    logits[1, 5] = float("nan")
    logits[4, 100:vocab] = float("-inf")
    plain = settings(rows)
    got = ops.draw(logits, plain, vocab).tolist()
    clean = logits.nan_to_num(nan=float("-inf"), posinf=None, neginf=float("-inf"))
    assert got == ref.draw_ref(clean, plain, vocab) and got[0] == 31
    again = torch.full((rows, 3), -7, device=DEVICE)
    ops.draw(logits, plain, vocab, shift=4, out=again[:, 1])
    assert again[:, 1].tolist() == ref.draw_ref(clean, plain, vocab, 4)
    assert bool((again[:, ::2] == -7).all())
    broken = torch.full((3, 40), float("nan"), device=DEVICE)
    for filters in ({}, {"min_p": [0.1], "top_k": [3.0], "top_p": [0.5]}):
        assert all(0 <= token < 40 for token in ops.draw(broken, settings(3, **filters)).tolist())
    print("draw: ok")


def check_filters() -> None:
    """Every row its own filters, strong enough that most draws are made again."""
    rows, vocab = 24, 300
    kinds: list[dict[str, list[float]]] = [
        {"min_p": [0.0], "top_k": [1.0, 2.0, 7.0], "top_p": [1.0]},
        {"min_p": [0.0], "top_k": [0.0, 400.0], "top_p": [0.02, 0.3, 0.9]},
        {"min_p": [0.6, 0.05], "top_k": [0.0], "top_p": [1.0, 0.5]},
        {"min_p": [0.02], "top_k": [5.0, 40.0, 0.0, 1.0], "top_p": [0.7, 0.95, 1.0]},
        {"min_p": [0.0], "top_k": [0.0], "top_p": [1.0]},
    ]
    redrawn = 0
    for kind in kinds:
        logits = rand(rows, vocab) * 1.5
        logits[:, 40:60] = logits[:, 20:40]  # ties at every bound
        logits[:, 70], logits[:, 71] = 0.0, -0.0
        chosen = settings(rows, **kind)
        got = ops.draw(logits, chosen).tolist()
        assert got == ref.draw_ref(logits, chosen), kind
        free = ops.draw(logits, settings(rows)).tolist()
        redrawn += sum(one != other for one, other in zip(got, free, strict=True))
    assert redrawn > 25, redrawn
    print("filters: ok")


def check_draw_words() -> None:
    """What the host writes is what is drawn; rows without filters draw alike with and without
    those fields."""
    rows, vocab = 6, 300
    logits = rand(rows, vocab) * 2
    for top_k in (0, 3, 2**32 - 1):
        draws = [
            Draw(
                Sampling(
                    temperature=0.4 * (r % 3), seed=2**64 - 1 - r, choice=2**32 - 1 - r, top_k=top_k
                ),
                9 + r,
            )
            for r in range(rows)
        ]
        words = torch.full((draw_words(rows + 2),), -1, dtype=torch.int32)
        write_draws(words.numpy(), rows + 2, enumerate(draws))
        words = words.to(DEVICE)
        padded = torch.cat([logits, logits[:2]])
        found = {
            f: ops.draw(padded, ops.DrawRows.of(words, rows + 2, f)).tolist() for f in (False, True)
        }
        wanted = draw_on_host(logits.cpu(), draws, False, gumbel_argmax_ref)[0]
        assert found[True][:rows] == wanted, top_k
        assert (found[True] == found[False]) == (top_k != 3)
        assert found[True][rows:] == logits[:2].argmax(1).tolist()
    print("draw words: ok")


def check_accept() -> None:
    drawn, given = [5, 6, 7, 8, 1, 2, 3, 9, 4], [0, 5, 6, 9, 0, 1, 2, 0, 0]
    first, count, width = [0, 4, 7, 0, 8, 1], [4, 3, 1, 0, 1, 2], 5
    got = ops.accept(*map(ints, (drawn, given, first, count)), width)
    wanted = ref.accept_ref(drawn, given, first, count, width)
    assert got.tolist() == wanted and wanted[0] == [2, 5, 6, 7, -1, -1], got
    assert wanted[1] == [2, 1, 2, 3, -1, -1] and wanted[3] == [0, -1, -1, -1, -1, -1]
    print("accept: ok")


if __name__ == "__main__":
    if DEVICE == "cpu":
        prepare()
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        check_products(dtype, 72, 40, 3, True)
        check_products(dtype, 64, 33, 18, False)
        check_rows(dtype)
        check_whole_blocks(dtype)
        check_wide(dtype)
    check_deep()
    check_plain()
    check_store(torch.float32, torch.float32, 16, True)
    check_store(torch.bfloat16, torch.bfloat16, 24, False)
    check_store(torch.bfloat16, torch.float8_e4m3fn, 16, True)
    check_qkv(torch.float32, torch.float32, 12, False, 3)
    check_qkv(torch.bfloat16, torch.bfloat16, 16, False, 35)
    check_qkv(torch.bfloat16, torch.float8_e4m3fn, 16, False, 33)
    check_qkv(torch.bfloat16, torch.bfloat16, 16, True, 3)
    check_noise()
    check_draw()
    check_filters()
    check_draw_words()
    check_accept()
