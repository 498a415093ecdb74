"""The C kernels against torch in higher precision, and the promise that a row stands alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from engine import linear as linear_module
from engine.kernels.cpu import build, ops
from engine.kernels.cpu.reference import rotate_ref
from engine.linear import Int8Linear, Mode, NativeLinear, pack_linear
from engine.noise import gumbel, philox

DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_kernels_compile_here() -> None:
    assert ops.available(), ops.unavailable_reason()
    assert ops.unavailable_reason() == ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "columns"), [(576, 96), (1536, 64), (100, 77), (33, 16), (7, 5)])
def test_linear_matches_and_rows_stand_alone(depth: int, columns: int, dtype: torch.dtype) -> None:
    weight = torch.randn(columns, depth).to(dtype)
    linear = pack_linear(weight, "native")
    assert linear.rows_independent
    assert (linear.in_features, linear.out_features) == (depth, columns)
    x = torch.randn(70, depth)
    full = linear(x)
    torch.testing.assert_close(full.double(), x.double() @ weight.double().T, atol=2e-4, rtol=1e-5)
    alone = torch.cat([linear(x[i : i + 1]) for i in range(20)])
    assert linear(x[:0]).shape == (0, columns)
    for rows in (*range(1, 21), 70):
        assert torch.equal(linear(x[:rows])[:20], alone[:rows]), f"{rows} rows"


@pytest.mark.parametrize("mode", ["native", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_is_added_in_fp32(dtype: torch.dtype, mode: Mode) -> None:
    weight, bias = torch.randn(40, 64).to(dtype), torch.randn(40).to(dtype)
    x = torch.randn(5, 64)
    biased, plain = pack_linear(weight, mode, bias), pack_linear(weight, mode)
    assert torch.equal(biased(x), plain(x) + bias.float())
    assert torch.equal(biased(x), biased(x))  # the bias itself is not added to
    assert biased.rows_independent == plain.rows_independent
    assert (biased.in_features, biased.out_features) == (64, 40)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_linear_matches(dtype: torch.dtype) -> None:
    weight = torch.randn(40, 64).to(dtype)
    x = torch.randn(5, 64)
    y = pack_linear(weight, "torch")(x)
    assert y.dtype == torch.float32
    # bf16 units round activations and result to bf16.
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, atol=0.25, rtol=1e-2)


def test_results_do_not_depend_on_threads() -> None:
    linear = pack_linear(torch.randn(200, 96), "native")
    x = torch.randn(9, 96)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = linear(x)
        torch.set_num_threads(2)
        assert torch.equal(linear(x), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 7, 28])
@pytest.mark.parametrize("fast", [True, False])
def test_int8_is_the_product_of_what_was_rounded(
    rows: int, dtype: torch.dtype, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole numbers times two scales, exactly; and near the product of what was not rounded."""
    if not fast:  # of CPUs that have no int8 dot products, on any
        monkeypatch.setattr(linear_module, "int8_is_fast", lambda: False)
    weight, x = torch.randn(210, 96).to(dtype), torch.randn(rows, 96) * torch.rand(rows, 1) * 9
    weight[7], x[0, 5] = 0.0, 40.0  # a column without a scale; a row with an outlier
    product = Int8Linear(weight)
    columns = weight.double().abs().amax(1) / 127
    largest = x.double().abs().amax(1, True) / product.levels
    w = (weight.double() / columns.clamp(min=1e-20)[:, None]).round()
    exact = (x.double() / largest).round() @ w.T * largest * columns
    y = product(x).double()
    wanted = x.double() @ weight.double().T
    # Where fp32 rounds another way than fp64, one whole number differs by one.
    torch.testing.assert_close(y, exact, atol=0.02 * float(wanted.std()), rtol=1e-3)
    assert float((y - wanted).std()) < 0.03 * 127 / product.levels * float(wanted.std())


def test_linear_refuses_other_weights() -> None:
    with pytest.raises(ValueError, match="accepted: bf16 or fp32"):
        pack_linear(torch.zeros(4, 4, dtype=torch.float16), "native")
    with pytest.raises(ValueError, match="2 dimensions"):
        pack_linear(torch.zeros(4), "native")
    linear = pack_linear(torch.zeros(4, 8), "native")
    for x in (torch.zeros(1, 7), torch.zeros(8), torch.zeros(1, 8, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"accepted: fp32 \[rows, 8\]"):
            linear(x)


@pytest.mark.parametrize("width", [576, 64, 13])
def test_norms(width: int) -> None:
    x, residual, weight = torch.randn(40, width), torch.randn(40, width), torch.randn(width)
    y = ops.rms_norm(x, weight, 1e-5)
    expected = ops.rms_norm_ref(x.double(), weight.double(), 1e-5)
    torch.testing.assert_close(y.double(), expected, atol=2e-6, rtol=2e-6)
    assert torch.equal(y[:1], ops.rms_norm(x[:1], weight, 1e-5))

    total = (x.double() + residual.double()).float()
    y = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    expected = ops.rms_norm_ref(total.double(), weight.double(), 1e-5)
    torch.testing.assert_close(y.double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("width", [1536, 19])
def test_silu_mul(width: int) -> None:
    x = torch.randn(12, 2 * width) * 8
    x[0, :4] = torch.tensor([100.0, -100.0, 88.5, -1e30])
    y = ops.silu_mul(x)
    torch.testing.assert_close(y.double(), ops.silu_mul_ref(x.double()), atol=1e-6, rtol=2e-6)
    assert torch.equal(y[3:4], ops.silu_mul(x[3:4]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "with_query"),
    [(64, True), (64, False), (80, True), (96, False), (2, True), (14, True), (1024, True)],
)
def test_rope_and_kv_write(dtype: torch.dtype, dim: int, with_query: bool) -> None:
    heads, kv_heads, rows = 6, 2, 50
    fused = torch.randn(rows, (heads + 2 * kv_heads) * dim)
    q, k, v = fused.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    angles = torch.outer(torch.arange(300.0), torch.rand(dim // 2))
    cos, sin = angles.cos(), angles.sin()
    positions, slots = torch.randint(0, 300, (rows,)), torch.randperm(80)[:rows]
    caches = [torch.zeros(10, 8, kv_heads, dim, dtype=dtype) for _ in range(2)]
    exact_k = rotate_ref(
        k.double().unflatten(1, (kv_heads, dim)), cos[positions].double(), sin[positions].double()
    )
    exact_q = rotate_ref(
        q.double().unflatten(1, (heads, dim)), cos[positions].double(), sin[positions].double()
    )
    plain_q = q.clone()
    ops.rope_kv_write(q if with_query else None, k, v, cos, sin, positions, *caches, slots)
    written = [cache.view(-1, kv_heads, dim)[slots] for cache in caches]
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(written[0].double(), exact_k, atol=tolerance, rtol=tolerance)
    assert torch.equal(written[1], v.unflatten(1, (kv_heads, dim)).to(dtype))
    untouched = torch.ones(80, dtype=torch.bool).index_fill_(0, slots, False)
    assert not caches[0].view(80, -1)[untouched].any()
    if with_query:
        torch.testing.assert_close(
            q.double().unflatten(1, (heads, dim)), exact_q, atol=1e-6, rtol=1e-6
        )
    else:
        assert torch.equal(q, plain_q)


def test_philox_known_answers() -> None:
    """Vectors that Random123 publishes for philox4x32-10."""
    words = philox(torch.zeros(1, 4, dtype=torch.int64), (0, 0))
    assert words[0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    words = philox(torch.full((1, 4), ones, dtype=torch.int64), (ones, ones))
    assert words[0].tolist() == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, -1, -(2**63), 0x123456789ABCDEF])
def test_noise_matches_reference(seed: int) -> None:
    vocab = 10_001
    noise = torch.empty(vocab)
    ops.library().sw_gumbel_noise(vocab, seed, 3, 4_000_000_000, noise.data_ptr())
    expected = gumbel(seed, 3, 4_000_000_000, vocab)
    torch.testing.assert_close(noise, expected, atol=2e-6, rtol=2e-6)
    assert abs(float(noise.mean()) - 0.5772) < 0.05


def test_gumbel_argmax_matches_reference() -> None:
    rows, vocab = 12, 9001
    logits = torch.randn(rows, vocab) * 3
    logits[3, 100:] = -torch.inf  # a filtered row
    temperatures = torch.tensor([0.0, 0.8, 1.0, 0.5] * 3)
    seeds = torch.arange(rows, dtype=torch.int64) * -(2**40) - 1
    choices, indices = torch.arange(rows) % 3, torch.arange(rows) * 1000
    margins = torch.empty(rows)
    ids = ops.gumbel_argmax(logits, temperatures, seeds, choices, indices, margins)
    expected = ops.gumbel_argmax_ref(logits, temperatures, seeds, choices, indices)
    assert torch.equal(ids, expected)
    top = logits.topk(2, dim=-1).values
    assert torch.equal(margins, top[:, 0] - top[:, 1])
    for row in range(rows):
        one = slice(row, row + 1)
        settings = (temperatures[one], seeds[one], choices[one], indices[one])
        assert ops.gumbel_argmax(logits[one], *settings).item() == ids[row]


def test_argmax_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(2, 20_000)
    logits[0, [9000, 150, 17_000]] = 5.0
    zeros = torch.zeros(2, dtype=torch.int64)
    margins = torch.empty(2)
    ids = ops.gumbel_argmax(logits, torch.zeros(2), zeros, zeros, zeros, margins)
    assert ids.tolist() == [150, 0]
    assert margins.tolist() == [0.0, 0.0]


CHECK = """
import torch
from engine.kernels.cpu import build, ops
from engine.linear import pack_linear
x = torch.ones(2, 8)
print(ops.available(), "|", ops.unavailable_reason(), "|", ops.rms_norm(x, x[0], 1e-5).sum().item(),
      "|", pack_linear(torch.ones(4, 8), "torch")(x).sum().item())
"""


def _fresh(cache: Path, **environment: str) -> str:
    root = Path(__file__).parents[2]
    full = {**os.environ, "SPECWIRE_CACHE": str(cache), "PYTHONPATH": str(root), **environment}
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        capture_output=True,
        text=True,
        env=full,
        cwd=root,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_a_compiler_torch_takes_over(tmp_path: Path) -> None:
    out = _fresh(tmp_path, CC="/nonexistent/compiler")
    available, reason, norm, product = out.split(" | ")
    assert available == "False"
    assert reason == "no C compiler (compiler not found)"
    assert (round(float(norm), 2), float(product)) == (16.0, 64.0)


def test_a_failing_compiler_is_a_reason(tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho x.c:1: error: no >&2\nexit 3\n'
    )
    compiler.chmod(0o755)
    assert "False | the C compiler failed with status 3: no |" in _fresh(tmp_path, CC=str(compiler))


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    """Where one before them ended within its build."""
    (tmp_path / "kernels" / "build.tmp").mkdir(parents=True)
    with ThreadPoolExecutor(2) as pool:
        outs = list(pool.map(lambda _: _fresh(tmp_path), range(2)))
    assert all(out.startswith("True |") for out in outs)
    suffixes = sorted(path.suffix for path in (tmp_path / "kernels").iterdir())
    assert suffixes == [".lock", ".so"]


def test_what_a_compiler_has_started_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cc` runs other programs, which a service that ends must not leave behind."""
    monkeypatch.setattr(build, "BUILD_SECONDS", 0.3)
    started = tmp_path / "started"
    command = ["sh", "-c", f"sleep 60 & echo $! > {started}; wait"]
    with pytest.raises(build.BuildUnavailable, match="did not run: TimeoutExpired"):
        build._run(command)
    of_it = Path("/proc", started.read_text().strip())
    deadline = time.monotonic() + 5
    while _runs(of_it) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(of_it)


def _runs(process: Path) -> bool:
    try:
        return process.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_native_linear_keeps_its_weight_alive() -> None:
    linear = NativeLinear(torch.eye(32))
    torch.randn(4096)
    assert torch.equal(linear(torch.eye(32)), torch.eye(32))
