"""Backends of dense attention (MHA, GQA, MQA) that the vLLM engine runs, as vLLM 0.33.0 declares
them. A limit that its table leaves open is taken as not supported.
"""

from __future__ import annotations

from engine.attention.capabilities import Backend, GraphLevel, GraphRule, Kind, KvRule, Sizes
from engine.attention.devices import ANY_GPU, CPU, SM12X, SM80_UP, SM90, SM100, Range

_MHA = (Kind.MHA,)
_HALF = ("float16", "bfloat16")
_PLAIN = KvRule(("auto", "float16", "bfloat16"))
_E4M3 = KvRule(("fp8", "fp8_e4m3"), stored="fp8_e4m3")
_E5M2 = KvRule(("fp8_e5m2",))
_BY_16 = (Sizes(multiple=16, low=16),)
_ALWAYS = (GraphRule(GraphLevel.ALWAYS),)
_UNIFORM = (GraphRule(GraphLevel.UNIFORM),)

FLASH_ATTN = Backend(
    name="FLASH_ATTN",
    kinds=_MHA,
    on=(SM80_UP,),
    dtypes=_HALF,
    kv=(_PLAIN, KvRule(("fp8", "fp8_e4m3"), stored="fp8_e4m3", on=(SM90, SM100))),
    pages=_BY_16,
    heads=(
        Sizes(multiple=8, high=512, on=(SM90, SM100)),
        Sizes(multiple=8, high=256),
    ),
    non_causal=True,
    window=True,
    sinks=(SM90, SM100),
    dcp_causal=True,
    dcp_non_causal=True,
    lse_base="e",
    graphs=(GraphRule(GraphLevel.ALWAYS, on=(SM90, SM100)), GraphRule(GraphLevel.UNIFORM)),
    note="FA3 on sm90, FA4 on sm100, FA2 elsewhere",
)

FLASHINFER = Backend(
    name="FLASHINFER",
    kinds=_MHA,
    on=(Range((8, 0), (12, 1)),),
    dtypes=_HALF,
    kv=(_PLAIN, _E4M3, _E5M2, KvRule(("nvfp4", "nvfp4_4over6"))),
    pages=(
        Sizes(listed=(16, 32, 64, 128, 256, 512, 1024), on=(SM100,)),
        Sizes(listed=(16, 32, 64)),
    ),
    heads=(Sizes(listed=(64, 128, 256, 512)),),
    non_causal=True,
    window=True,
    sinks=(SM100,),
    dcp_causal=True,
    dcp_group_non_causal=False,
    non_causal_kv_refused=("nvfp4", "nvfp4_4over6"),
    lse_base="e",
    graphs=(
        GraphRule(GraphLevel.UNIFORM_SINGLE, dcp=True),
        GraphRule(GraphLevel.UNIFORM, causal=True),
        GraphRule(GraphLevel.UNIFORM, on=(SM90, SM12X)),
        GraphRule(GraphLevel.UNIFORM_SINGLE),
    ),
    note="trtllm-gen on sm100, XQA on sm90 and sm12x; pages above 64 are trtllm-gen's",
)

TRITON_ATTN = Backend(
    name="TRITON_ATTN",
    kinds=_MHA,
    on=(ANY_GPU,),
    dtypes=(*_HALF, "float32"),
    kv=(
        _PLAIN,
        _E4M3,
        _E5M2,
        KvRule(("int4_per_token_head", "int8_per_token_head", "fp8_per_token_head")),
    ),
    pages=_BY_16,
    heads=(Sizes(low=32),),
    non_causal=True,
    window=True,
    sinks=(ANY_GPU,),
    graphs=_ALWAYS,
)

FLEX_ATTENTION = Backend(
    name="FLEX_ATTENTION",
    kinds=_MHA,
    on=(ANY_GPU,),
    dtypes=(*_HALF, "float32"),
    kv=(_PLAIN,),
    pages=_BY_16,
    non_causal=True,
    window=True,
    graphs=_ALWAYS,
)

TURBOQUANT = Backend(
    name="TURBOQUANT",
    kinds=_MHA,
    on=(ANY_GPU,),
    dtypes=_HALF,
    kv=(KvRule(("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_3bit_nc")),),
    pages=(Sizes(listed=(16, 32, 64, 128)),),
    graphs=_UNIFORM,
    note="bytes a token are not declared",
)

B12X = Backend(
    name="B12X",
    kinds=_MHA,
    on=(Range((12, 0), (12, 1)),),
    dtypes=("bfloat16",),
    kv=(KvRule(("auto", "bfloat16")), _E4M3),
    pages=(Sizes(listed=(64,)),),
    heads=(Sizes(listed=(64, 128, 192, 256)),),
    graphs=_UNIFORM,
)

HPC_ATTN = Backend(
    name="HPC_ATTN",
    kinds=_MHA,
    on=(SM90,),
    dtypes=("bfloat16",),
    kv=(KvRule(("auto", "bfloat16")), KvRule(("fp8_e4m3",))),
    pages=(Sizes(listed=(64,)),),
    heads=(Sizes(listed=(128,)),),
    graphs=(GraphRule(GraphLevel.UNIFORM_SINGLE),),
    note="made for one model family (Hy3); its level is UNIFORM in some settings",
)

CPU_ATTN = Backend(
    name="CPU_ATTN",
    kinds=_MHA,
    on=(CPU,),
    dtypes=(*_HALF, "float32"),
    kv=(
        _PLAIN,
        KvRule(("fp8", "fp8_e4m3"), stored="fp8_e4m3", only=("amx", "avx512")),
        KvRule(("fp8_e5m2",), only=("amx", "avx512")),
    ),
    pages=(Sizes(multiple=32, low=32),),
    heads=(Sizes(listed=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)),),
    non_causal=True,
    window=True,
)

ROWS = (
    FLASH_ATTN,
    FLASHINFER,
    TRITON_ATTN,
    FLEX_ATTENTION,
    TURBOQUANT,
    B12X,
    HPC_ATTN,
    CPU_ATTN,
)
