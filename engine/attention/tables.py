"""Which rows an engine has, and the order in which they are tried."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from engine.attention import table_mha, table_mla, table_native
from engine.attention.capabilities import Backend, Kind
from engine.attention.devices import (
    ANY_GPU,
    ANYWHERE,
    CPU,
    SM12X,
    SM90,
    SM100,
    DeviceProfile,
    Range,
    covered,
)

EngineName = Literal["native", "vllm"]
Table = Mapping[str, Backend]


def table_of(rows: Iterable[Backend]) -> Table:
    return MappingProxyType({row.name: row for row in rows})


_VLLM = table_of((*table_mha.ROWS, *table_mla.ROWS))
# The native engine knows the names of all, so that it can say why one is not in use.
_NATIVE = table_of({**_VLLM, **table_of(table_native.ROWS)}.values())


def table_for(engine: EngineName) -> Table:
    return _NATIVE if engine == "native" else _VLLM


@dataclass(frozen=True, slots=True)
class Order:
    """Names in order of preference. None matches both; the first rule that fits counts."""

    names: tuple[str, ...]
    kinds: tuple[Kind, ...]
    on: tuple[Range, ...] = ANYWHERE
    causal: bool | None = None
    quantised: bool | None = None
    few_heads: bool | None = None  # 16 or fewer
    wide_head: bool | None = None  # head size 512


_MHA, _MLA, _SPARSE, _DSV4 = (Kind.MHA,), (Kind.MLA,), (Kind.SPARSE_MLA,), (Kind.DSV4,)
_SM100_MLA = (
    "FLASHINFER_MLA",
    "TOKENSPEED_MLA",
    "CUTLASS_MLA",
    "FLASH_ATTN_MLA",
    "FLASHMLA",
    "TRITON_MLA",
)
_SM90_MLA = ("FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA")
_TAIL = ("TRITON_ATTN", "FLEX_ATTENTION", "TURBOQUANT")

# vLLM 0.33.0, platforms/cuda.py. On sm100, non-causal layers take the order of the other devices:
# FlashInfer's non-causal path there has known problems.
_ORDERS = (
    Order(("FLASHINFER", "FLASH_ATTN", *_TAIL), _MHA, (SM100,), causal=True),
    Order(("FLASH_ATTN", "FLASHINFER", *_TAIL), _MHA, (ANY_GPU,)),
    Order(("CPU_ATTN",), _MHA, (CPU,)),
    Order((*_SM100_MLA, "FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE"), _MLA, (SM100,)),
    Order(
        ("FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE", *_SM100_MLA), _SPARSE, (SM100,), quantised=True
    ),
    Order(
        ("FLASH_ATTN_MLA_SPARSE_FA4", "FLASHINFER_MLA_SPARSE", "FLASHMLA_SPARSE", *_SM100_MLA),
        _SPARSE,
        (SM100,),
        few_heads=True,
    ),
    Order(("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE", *_SM100_MLA), _SPARSE, (SM100,)),
    Order(("TRITON_MLA", "FLASHINFER_MLA_SPARSE_SM120"), (*_MLA, *_SPARSE), (SM12X,)),
    Order(
        (
            *_SM90_MLA,
            "FLASHINFER_MLA_SPARSE_SM90",
            "FLASH_ATTN_MLA_SPARSE",
            "FLASHMLA_SPARSE",
        ),
        _SPARSE,
        (SM90,),
        wide_head=True,
    ),
    Order(
        (
            *_SM90_MLA,
            "FLASH_ATTN_MLA_SPARSE",
            "FLASHMLA_SPARSE",
            "FLASHINFER_MLA_SPARSE_SM90",
        ),
        (*_MLA, *_SPARSE),
        (ANY_GPU,),
    ),
    Order(("CPU_MLA", "AMX_MLA"), (*_MLA, *_SPARSE), (CPU,)),
    Order(("FLASHMLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV4"), _DSV4),
)
_NATIVE_ORDERS = (
    Order(("TRITON_MLA", "TORCH_MLA", "FLASHINFER_MLA"), _MLA, (ANY_GPU,)),
    Order(("TORCH_MLA", "TRITON_MLA"), _MLA),
    Order(
        ("TRITON_ATTN", "FLASHINFER", "FLASH_ATTN", "FLEX_ATTENTION", "TORCH_SDPA"),
        _MHA,
        (ANY_GPU,),
    ),
    Order(("CPU_ATTN", "TORCH_SDPA"), tuple(Kind)),
)


def order_for(
    engine: EngineName,
    device: DeviceProfile,
    kind: Kind,
    *,
    causal: bool,
    quantised: bool,
    heads: int,
    head_size: int,
) -> tuple[str, ...]:
    """Names to try for layers of a kind, best first."""
    for order in _NATIVE_ORDERS if engine == "native" else _ORDERS:
        wanted = (
            (order.causal, causal),
            (order.quantised, quantised),
            (order.few_heads, heads <= 16),
            (order.wide_head, head_size == 512),
        )
        fits = kind in order.kinds and covered(order.on, device)
        if fits and all(want in (None, is_) for want, is_ in wanted):
            return order.names
    raise AssertionError(f"no order for {kind} on {device.name}")
