"""What Triton makes of a product that is added to something, for capability 9.0; needs no GPU.

A product whose depth is one step must be added up like one of several: from zero, then the sum.
"""

from __future__ import annotations

from typing import Any

from engine.kernels.triton.product import _gemm
from tests.engine.before_wait import ir_of

_FIXED: dict[str, Any] = {
    "N": 256, "NORM": False, "SCALED": False, "GATED": False, "ADD": False, "BIAS": False,
    "INDEX": False, "ROWS": 64, "BLOCK_N": 64, "BLOCK_K": 128, "WIDEN": False, "BLOCKS": False,
    "LINES": 0, "PDL": False,
}  # fmt: skip


def begins(depth: int, **chosen: bool) -> list[str]:
    """What each product of the kernel begins with, by its name in Triton's IR."""
    ir = ir_of(_gemm, _FIXED | {"K": depth} | chosen, out="*fp32")
    products = [line for line in ir if "tt.dot" in line]
    return [line.split("tt.dot ")[1].split(" :")[0].split(", ")[2] for line in products]


def main() -> None:
    for chosen in ({"ADD": True}, {"BIAS": True}, {"ADD": True, "BIAS": True}):
        for name in begins(128, **chosen):
            print("one step", *chosen, "begins with", "zero" if "cst" in name else name)


if __name__ == "__main__":
    main()
