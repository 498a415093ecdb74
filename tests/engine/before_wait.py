"""What our kernels read before they wait for the one in front of them, from Triton's IR of them for
compute capability 9.0; needs no GPU.

Prints, for each kernel, the arguments that it loads from, stores to or asks the L2 cache for
before the wait.
"""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention.kernels.combine import _combine
from engine.attention.kernels.paged import _attend
from engine.kernels.triton.norm import _embed, _rms_norm
from engine.kernels.triton.plain import _silu_mul
from engine.kernels.triton.product import _gemm
from engine.kernels.triton.qkv import _norm_qkv_store
from engine.kernels.triton.store import _context_store, _qkv_store

_NUMBERS = ("words", "ids", "index", "positions", "slots", "arrived")
_FLOATS = ("norm", "q_norm", "k_norm", "k_norms", "cos", "sin", "sums", "parts", "scales")
_SCALARS = ("eps", "scale")
_INTS = (
    "rows", "stride", "plane", "x_stride", "out_stride", "items_at", "table_at", "pages_per_span",
    "stride_q", "window", "tiles_end",
)  # fmt: skip
_TILE = {"ROWS": 16, "BLOCK_N": 16, "BLOCK_K": 128, "WIDEN": False, "LINES": 8}
_HEADS = {"HEADS": 32, "KV_HEADS": 8, "D": 128, "BLOCK_D": 128, "M": 16, "N": 64, "CHUNK": 16}
_ATTENTION = _HEADS | {"CAUSAL": True, "LSE": False}
_PAGED = {
    "STRIDE_PAGE": 16384, "STRIDE_TOKEN": 1024, "PAGE": 16, "WHOLE": False, "WINDOWED": False,
    "HALF": True, "IEEE": False, "FINISH": 0,
}  # fmt: skip
_STORE = {"HK": 8, "D": 128, "HALF": 64, "NORM": True, "FP8": False}
KERNELS: list[tuple[Any, dict[str, Any]]] = [
    (_attend, _ATTENTION | _PAGED),
    (_combine, _ATTENTION | {"R": 8}),
    (_qkv_store, _STORE | {"HQ": 32}),
    (_context_store, _STORE),
    (_norm_qkv_store, _TILE | {"K": 576, "HQ": 9, "HK": 3, "D": 64, "BIAS": True, "FP8": False}),
    (_gemm, _TILE | {"N": 256, "K": 576, "NORM": True, "SCALED": False, "GATED": True, "ADD": True,
                     "BIAS": True, "INDEX": True, "BLOCKS": False}),
    (_rms_norm, {"K": 4096, "BLOCK": 4096, "INDEX": True}),
    (_embed, {"K": 576, "BLOCK": 1024}),
    (_silu_mul, {"N": 1024, "BLOCK": 1024}),
]  # fmt: skip


def _type(name: str, fixed: dict[str, Any]) -> str:
    """Of an argument in Triton's signatures."""
    for names, kind in ((fixed, "constexpr"), (_INTS, "i32"), (_SCALARS, "fp32")):
        if name in names:
            return kind
    return "*i32" if name in _NUMBERS else "*fp32" if name in _FLOATS else "*bf16"


def ir_of(kernel: Any, fixed: dict[str, Any], **types: str) -> list[str]:
    """Lines of its IR before Triton knows layouts, early launch unless `fixed` says otherwise;
    `types` are those of arguments that are not what their names stand for elsewhere."""
    fixed, names = {"PDL": True} | fixed, list(kernel.arg_names)
    source = ASTSource(
        kernel,
        signature={name: types.get(name) or _type(name, fixed) for name in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return str(made.asm["ttir"]).splitlines()


def touched(ir: list[str]) -> set[str]:
    """Arguments behind the pointers of what is done before the wait."""
    behind: dict[str, set[str]] = {}  # addresses by name
    found: set[str] = set()
    for line in ir:
        if "tt.func" in line:
            behind = {f"%{name}": {name} for name in re.findall(r"%(\w+): !tt\.ptr", line)}
            continue
        code = line.split(" loc(")[0]
        if re.search(r"grid_dependency_wait|griddepcontrol\.wait", code):
            return found
        made, is_given, body = code.partition(" = ")
        used = set().union(*(behind.get(name, set()) for name in re.findall(r"%[\w#]+", code)))
        if re.search(r"tt\.(load|store|atomic\w*)\b|inline_asm", body or code):
            found |= {f"asked:{name}" for name in used} if "inline_asm" in code else used
        elif used and is_given:
            behind[made.strip()] = used
    raise AssertionError("the kernel does not wait")


def main() -> None:
    for kernel, fixed in KERNELS:
        print(kernel.__name__, *sorted(touched(ir_of(kernel, fixed))))


if __name__ == "__main__":
    main()
