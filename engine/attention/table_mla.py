"""Backends of latent attention (MLA, sparse MLA, DeepSeek-V4) that the vLLM engine runs, as vLLM
0.33.0 declares them. None has a sliding window, except DeepSeek-V4's.
"""

from __future__ import annotations

from engine.attention.capabilities import Backend, GraphLevel, GraphRule, Kind, KvRule, Sizes
from engine.attention.devices import ANY_GPU, CPU, SM12X, SM90, SM100

_MLA, _SPARSE, _DSV4 = (Kind.MLA,), (Kind.SPARSE_MLA,), (Kind.DSV4,)
_HALF = ("float16", "bfloat16")
_PLAIN = KvRule(("auto", "float16", "bfloat16"))
_PLAIN_BF16 = KvRule(("auto", "bfloat16"))
_E4M3 = KvRule(("fp8", "fp8_e4m3"), stored="fp8_e4m3")
_DS = KvRule(("fp8_ds_mla",))
_BY_16, _BY_64 = (Sizes(multiple=16, low=16),), (Sizes(multiple=64, low=64),)
_SMALL = (Sizes(listed=(32, 64)),)
_UNIFORM = (GraphRule(GraphLevel.UNIFORM),)
_ALWAYS = (GraphRule(GraphLevel.ALWAYS),)

FLASH_ATTN_MLA = Backend(
    name="FLASH_ATTN_MLA", kinds=_MLA, on=(SM90,), dtypes=_HALF, kv=(_PLAIN,), pages=_BY_16,
    dcp_causal=True, lse_base="e", graphs=_UNIFORM,
)  # fmt: skip

FLASHMLA = Backend(
    name="FLASHMLA", kinds=_MLA, on=(SM90, SM100), dtypes=_HALF, kv=(_PLAIN, _E4M3),
    pages=(Sizes(listed=(64,)),), dcp_causal=True, lse_base="e", graphs=_UNIFORM,
)  # fmt: skip

FLASHINFER_MLA = Backend(
    name="FLASHINFER_MLA", kinds=_MLA, on=(SM100,), dtypes=_HALF, kv=(_PLAIN, _E4M3), pages=_SMALL,
    qk_nope=(64, 128, 192), non_causal=True, dcp_causal=True, dcp_non_causal=True, lse_base="e",
    graphs=_ALWAYS,
)  # fmt: skip

TOKENSPEED_MLA = Backend(
    name="TOKENSPEED_MLA", kinds=_MLA, on=(SM100,), dtypes=_HALF, kv=(_E4M3,), pages=_SMALL,
    heads=(Sizes(listed=(576,)),), qk_nope=(128,), non_causal=True, dcp_causal=True,
    dcp_non_causal=True, lse_base="2", graphs=_UNIFORM, note="dimensions of DeepSeek-R1 only",
)  # fmt: skip

CUTLASS_MLA = Backend(
    name="CUTLASS_MLA", kinds=_MLA, on=(SM100,), dtypes=_HALF, kv=(_PLAIN, _E4M3),
    pages=(Sizes(listed=(128,)),), dcp_causal=True, lse_base="e",
    graphs=(GraphRule(GraphLevel.UNIFORM_SINGLE),), note="no graph for verify blocks",
)  # fmt: skip

TRITON_MLA = Backend(
    name="TRITON_MLA", kinds=_MLA, on=(ANY_GPU,), dtypes=_HALF, kv=(_PLAIN, _E4M3), pages=_BY_16,
    non_causal=True, dcp_causal=True, dcp_draft_block=False, lse_base="e", graphs=_UNIFORM,
)  # fmt: skip

FLASHMLA_SPARSE = Backend(
    name="FLASHMLA_SPARSE", kinds=_SPARSE, on=(SM90, SM100), dtypes=("bfloat16",),
    kv=(
        _PLAIN_BF16,
        KvRule(("fp8", "fp8_ds_mla"), stored="fp8_ds_mla"),
        KvRule(("nvfp4_ds_mla",), on=(SM100,)),
    ),
    pages=_BY_64, heads=(Sizes(listed=(512, 576)),), dcp_causal=True, dcp_kv=("fp8_ds_mla",),
    lse_base="e", graphs=_UNIFORM,
)  # fmt: skip

FLASHINFER_MLA_SPARSE = Backend(
    name="FLASHINFER_MLA_SPARSE", kinds=_SPARSE, on=(SM100,), dtypes=_HALF, kv=(_PLAIN, _E4M3),
    pages=(Sizes(multiple=32, low=32),), dcp_causal=True, lse_base="2", graphs=_UNIFORM,
)  # fmt: skip

FLASHINFER_MLA_SPARSE_SM120 = Backend(
    name="FLASHINFER_MLA_SPARSE_SM120", kinds=_SPARSE, on=(SM12X,), dtypes=_HALF, kv=(_DS,),
    pages=_BY_64, index_topk=2048, graphs=_UNIFORM,
)  # fmt: skip

FLASHINFER_MLA_SPARSE_SM90 = Backend(
    name="FLASHINFER_MLA_SPARSE_SM90", kinds=_SPARSE, on=(SM90,), dtypes=_HALF,
    kv=(_PLAIN_BF16, _E4M3), pages=_BY_64, heads=(Sizes(listed=(512, 576)),), graphs=_UNIFORM,
)  # fmt: skip

FLASH_ATTN_MLA_SPARSE = Backend(
    name="FLASH_ATTN_MLA_SPARSE", kinds=_SPARSE, on=(SM90,), dtypes=_HALF, kv=(_PLAIN,),
    pages=_BY_64, graphs=_UNIFORM,
)  # fmt: skip

FLASH_ATTN_MLA_SPARSE_FA4 = Backend(
    name="FLASH_ATTN_MLA_SPARSE_FA4", kinds=_SPARSE, on=(SM100,), dtypes=("bfloat16",),
    kv=(_PLAIN_BF16,), pages=_BY_64, dcp_causal=True, lse_base="e", graphs=_UNIFORM,
)  # fmt: skip

FLASHMLA_SPARSE_DSV4 = Backend(
    name="FLASHMLA_SPARSE_DSV4", kinds=_DSV4, on=(SM90, SM100), dtypes=("bfloat16",),
    kv=(KvRule(("auto", "fp8", "fp8_ds_mla"), stored="fp8_ds_mla"),),
    pages=(Sizes(listed=(256,)),), heads=(Sizes(listed=(512,)),), non_causal=True,
    non_causal_full=False, window=True,
    sinks=(SM90, SM100),
    graphs=(GraphRule(GraphLevel.UNIFORM, windowed=True), GraphRule(GraphLevel.ALWAYS)),
    note="non-causal through DSpark's window index list; pages of the window cache hold 64 tokens",
)  # fmt: skip

FLASHINFER_MLA_SPARSE_DSV4 = Backend(
    name="FLASHINFER_MLA_SPARSE_DSV4", kinds=_DSV4, on=(SM100, SM12X), dtypes=("bfloat16",),
    kv=(
        KvRule(("auto", "bfloat16"), on=(SM100,)),
        KvRule(("fp8", "fp8_e4m3"), stored="fp8_e4m3"),
        KvRule(("fp8_ds_mla",), on=(SM12X,)),
    ),
    pages=(Sizes(listed=(256,)),), heads=(Sizes(listed=(512,)),), non_causal=True,
    non_causal_full=False, window=True,
    sinks=(SM100, SM12X), graphs=_ALWAYS,
    note="non-causal through DSpark's window index list",
)  # fmt: skip

CPU_MLA = Backend(
    name="CPU_MLA", kinds=_MLA, on=(CPU,), dtypes=(*_HALF, "float32"), kv=(KvRule(("auto",)),),
    pages=(Sizes(listed=(16,)),), heads=(Sizes(listed=(576,)),),
)  # fmt: skip

AMX_MLA = Backend(
    name="AMX_MLA", kinds=_MLA, on=(CPU,), dtypes=("bfloat16",),
    kv=(KvRule(("auto", "bfloat16"), only=("amx",)),), pages=(Sizes(multiple=32, low=32),),
    heads=(Sizes(listed=(576,)),),
)  # fmt: skip

ROWS = (
    FLASH_ATTN_MLA,
    FLASHMLA,
    FLASHINFER_MLA,
    TOKENSPEED_MLA,
    CUTLASS_MLA,
    TRITON_MLA,
    FLASHMLA_SPARSE,
    FLASHINFER_MLA_SPARSE,
    FLASHINFER_MLA_SPARSE_SM120,
    FLASHINFER_MLA_SPARSE_SM90,
    FLASH_ATTN_MLA_SPARSE,
    FLASH_ATTN_MLA_SPARSE_FA4,
    FLASHMLA_SPARSE_DSV4,
    FLASHINFER_MLA_SPARSE_DSV4,
    CPU_MLA,
    AMX_MLA,
)
