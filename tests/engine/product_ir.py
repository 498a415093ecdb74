"""What Triton makes of a product that is added to something, for capability 9.0; needs no GPU.

A product whose depth is one step must be added up like one of several: from zero, then the sum.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.triton.product import _gemm

_TYPES = {
    "x": "*bf16", "index": "*bf16", "norm": "*bf16", "scales": "*bf16", "weight": "*bf16",
    "bias": "*bf16", "out": "*fp32", "rows": "i32", "x_stride": "i32", "out_stride": "i32",
    "eps": "fp32",
}  # fmt: skip


def begins(depth: int, **chosen: bool) -> list[str]:
    """What each product of the kernel begins with, by its name in Triton's IR."""
    fixed: dict[str, Any] = {
        "N": 256, "K": depth, "NORM": False, "SCALED": False, "GATED": False, "ADD": False,
        "BIAS": False, "INDEX": False, "ROWS": 64, "BLOCK_N": 64, "BLOCK_K": 128, "WIDEN": False,
        "LINES": 0, "PDL": False,
    }  # fmt: skip
    names = list(_gemm.arg_names)
    source = ASTSource(
        _gemm,
        signature={name: _TYPES.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in (fixed | chosen).items()},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    products = [line for line in made.asm["ttir"].splitlines() if "tt.dot" in line]
    return [line.split("tt.dot ")[1].split(" :")[0].split(", ")[2] for line in products]


def main() -> None:
    for chosen in ({"ADD": True}, {"BIAS": True}, {"ADD": True, "BIAS": True}):
        for name in begins(128, **chosen):
            print("one step", *chosen, "begins with", "zero" if "cst" in name else name)


if __name__ == "__main__":
    main()
