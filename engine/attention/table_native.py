"""Our own backends: what the code of each one takes. The torch ones are also the truth of tests."""

from __future__ import annotations

from engine.attention.capabilities import Backend, GraphLevel, GraphRule, Kind, KvRule, Sizes
from engine.attention.devices import ANY_GPU, CPU, SM80_UP, Range

_HALF = ("float16", "bfloat16")
_ALL = ("float32", *_HALF)
_E4M3 = KvRule(("fp8", "fp8_e4m3"), stored="fp8_e4m3", on=(CPU, Range((8, 9))))

CPU_ATTN = Backend(
    name="CPU_ATTN",
    kinds=(Kind.MHA,),
    on=(CPU,),
    dtypes=("float32",),
    kv=(KvRule(("auto", "float32", "bfloat16")),),
    pages=(Sizes(),),
    heads=(Sizes(multiple=8, high=1024),),
    non_causal=True,
    window=True,
    implemented=True,
    note="rows do not depend on the rows beside them; activations are fp32",
)

TRITON_ATTN = Backend(
    name="TRITON_ATTN",
    kinds=(Kind.MHA,),
    on=(SM80_UP, CPU),
    dtypes=_ALL,
    kv=(KvRule(("auto", *_ALL)), _E4M3, KvRule(("fp8_e5m2",))),
    pages=(Sizes(),),
    heads=(Sizes(low=8, high=256),),
    non_causal=True,
    window=True,
    lse_base="e",
    graphs=(GraphRule(GraphLevel.ALWAYS, on=(ANY_GPU,)),),
    implemented=True,
    ran_on_gpu=True,
    note="rows do not depend on the rows beside them; on the CPU with TRITON_INTERPRET=1 only",
)

FLASHINFER = Backend(
    name="FLASHINFER",
    kinds=(Kind.MHA,),
    on=(Range((8, 0), (12, 1)),),
    dtypes=_HALF,
    kv=(KvRule(("auto", *_HALF)),),
    pages=(Sizes(listed=(16, 32, 64)),),
    heads=(Sizes(listed=(64, 128)),),
    non_causal=True,
    implemented=True,
    ran_on_gpu=True,
    note="needs the package flashinfer-python; KV of the activations' dtype",
)

FLASH_ATTN = Backend(
    name="FLASH_ATTN",
    kinds=(Kind.MHA,),
    on=(SM80_UP,),
    dtypes=_HALF,
    kv=(KvRule(("auto", *_HALF)),),
    pages=(Sizes(),),
    heads=(Sizes(multiple=8, high=256),),
    non_causal=True,
    window=True,
    implemented=True,
    ran_on_gpu=True,
    note="the FlashAttention 2 kernel of torch over gathered keys; KV of the activations' dtype",
)

FLEX_ATTENTION = Backend(
    name="FLEX_ATTENTION",
    kinds=(Kind.MHA,),
    on=(ANY_GPU, CPU),
    dtypes=_ALL,
    kv=(KvRule(("auto", *_ALL)),),
    pages=(Sizes(),),
    heads=(Sizes(low=16),),
    non_causal=True,
    window=True,
    implemented=True,
    ran_on_gpu=True,
    note="torch's flex_attention over gathered keys",
)

TORCH_SDPA = Backend(
    name="TORCH_SDPA",
    kinds=(Kind.MHA,),
    on=(CPU, ANY_GPU),
    dtypes=_ALL,
    kv=(KvRule(("auto", "float32", "bfloat16")),),
    pages=(Sizes(),),
    non_causal=True,
    window=True,
    implemented=True,
    ran_on_gpu=True,
    note="the plain reference: any head size, any page size",
)

TRITON_MLA = Backend(
    name="TRITON_MLA",
    kinds=(Kind.MLA,),
    on=(SM80_UP, CPU),
    dtypes=_ALL,
    kv=(
        KvRule(("auto", *_ALL)),
        KvRule(("fp8", "fp8_ds_mla"), stored="fp8_ds_mla", on=(CPU, Range((8, 9)))),
    ),
    pages=(Sizes(),),
    non_causal=True,
    window=True,
    lse_base="e",
    graphs=(GraphRule(GraphLevel.ALWAYS),),
    implemented=True,
    ran_on_gpu=True,
    note="rows do not depend on the rows beside them; on the CPU with TRITON_INTERPRET=1 only",
)

TORCH_MLA = Backend(
    name="TORCH_MLA",
    kinds=(Kind.MLA,),
    on=(CPU, ANY_GPU),
    dtypes=_ALL,
    kv=(KvRule(("auto", *_ALL)), KvRule(("fp8", "fp8_ds_mla"), stored="fp8_ds_mla")),
    pages=(Sizes(),),
    non_causal=True,
    window=True,
    implemented=True,
    ran_on_gpu=True,
    note="the plain reference of latent attention: any rank, any page size",
)

ROWS = (
    CPU_ATTN,
    TRITON_ATTN,
    FLASHINFER,
    FLASH_ATTN,
    FLEX_ATTENTION,
    TORCH_SDPA,
    TRITON_MLA,
    TORCH_MLA,
)
