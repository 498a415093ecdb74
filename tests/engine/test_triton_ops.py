"""The fused Triton operators against their torch references; on the GPU at real sizes too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = (
    *("linear_add", "norm_linear", "norm_gate_up", "head", "embed", "qkv_store", "context_store"),
    *(
        "plain",
        "noise",
        "draw",
        "filters",
        "draw words",
        "accept",
        "rows independent",
        "wide head",
    ),
)


def run(script: str, *arguments: str, **environment: str) -> str:
    """Output of a script of this repository in a process of its own."""
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root), *sys.path])
    done = subprocess.run(
        [sys.executable, str(root / script), *arguments],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_operators_equal_their_references() -> None:
    """In Triton's interpreter, on tiny sizes."""
    said = run("tests/engine/triton_ops_check.py", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert all(name in said for name in CHECKS), said


def test_a_product_of_one_step_begins_with_zero() -> None:
    """Else a row's bits depend on which tile its batch is given: a step of many rows takes more of
    the depth at once, and where that is all of it the compiler would begin with what is added."""
    said = run("tests/engine/product_ir.py", TRITON_INTERPRET="0").splitlines()
    assert len(said) == 3
    assert all(line.endswith("begins with zero") for line in said), said


def test_kernels_are_compiled_before_they_are_launched() -> None:
    """With Triton's compiler, several at once; a launch would fail here."""
    said = run("tests/engine/compiling_check.py", TRITON_INTERPRET="0").splitlines()
    assert said == [
        *("compiled", "zeros", "not within itself", "others launch"),
        *("stopped", "left to the launch", "compiled"),
    ]


def test_a_check_finds_its_kernels_compiled() -> None:
    """What is compiled ahead is what the cases launch, and the compiler's cache has it then."""
    said = run("tests/engine/attention_kernel_checks.py", TRITON_INTERPRET="0").splitlines()
    assert said[0] == "the same" and said[-1] == "3 found, 0 not", said


# Nothing here is written by a kernel near in front: words, tables and weights. What is only asked
# for is not read.
BEFORE_WAIT = {
    "_attend": {"words", "asked:k_cache", "asked:v_cache"},
    "_combine": {"words"},
    "_qkv_store": {"slots", "positions", "cos", "sin", "q_norm", "k_norm"},
    "_context_store": set(),
    "_norm_qkv_store": {"slots", "positions", "cos", "sin", "asked:weight"},
    "_gemm": {"asked:weight"},
    "_rms_norm": {"weight"},
    "_embed": set(),
    "_silu_mul": set(),
}


def test_kernels_read_nothing_too_early() -> None:
    """A kernel that is started while the one in front still runs must wait before it reads what
    that one writes, and before it writes anything; the interpreter would never tell."""
    said = run("tests/engine/before_wait.py", TRITON_INTERPRET="0").splitlines()
    found = {name: set(touched) for name, *touched in map(str.split, said)}
    assert found == BEFORE_WAIT


def test_without_a_gpu_the_reason_is_given() -> None:
    said = run("tests/engine/triton_absent.py", TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    assert "Triton kernels are not available" in said and "CUDA" in said


@pytest.mark.gpu
def test_operators_on_the_gpu() -> None:
    said = run("tests/engine/triton_ops_check.py")
    assert all(name in said for name in CHECKS), said


@pytest.mark.gpu
def test_operators_at_real_sizes(tmp_path: Path) -> None:
    """Errors against fp64, and a row's bits whatever stands beside it, M = 1..33."""
    found = tmp_path / "found.json"
    run("tests/load/bench_kernels.py", "--check", "--out", str(found))
    report = json.loads(found.read_text())
    assert report["failed"] == [] and len(report["checks"]) > 20
