"""Our own backends. Those in torch are the truth of tests; none was ever run on a GPU by us."""

from __future__ import annotations

from engine.attention.capabilities import Backend, GraphLevel, GraphRule, Kind, KvRule, Sizes
from engine.attention.devices import ANYWHERE, CPU, SM80_UP, SM89_UP

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

TORCH_SDPA = Backend(
    name="TORCH_SDPA",
    kinds=(Kind.MHA,),
    on=(CPU,),
    dtypes=("float32",),
    kv=(KvRule(("auto", "float32", "bfloat16")),),
    pages=(Sizes(),),
    non_causal=True,
    window=True,
    implemented=True,
    note="the plain reference: any head size, any page size",
)

TORCH_MLA = Backend(
    name="TORCH_MLA",
    kinds=(Kind.MLA,),
    on=ANYWHERE,
    dtypes=("float32", "float16", "bfloat16"),
    kv=(
        KvRule(("auto", "float32", "float16", "bfloat16")),
        KvRule(("fp8", "fp8_ds_mla"), stored="fp8_ds_mla"),
    ),
    pages=(Sizes(),),
    non_causal=True,
    window=True,
    implemented=True,
    note="the plain reference of latent attention: any rank, any page size",
)

TRITON_MLA = Backend(
    name="TRITON_MLA",
    kinds=(Kind.MLA,),
    on=(CPU, SM80_UP),
    dtypes=("float32", "float16", "bfloat16"),
    kv=(
        KvRule(("auto", "float32", "float16", "bfloat16")),
        KvRule(("fp8", "fp8_ds_mla"), stored="fp8_ds_mla", on=(CPU, SM89_UP)),
    ),
    pages=(Sizes(),),
    non_causal=True,
    window=True,
    lse_base="e",
    graphs=(GraphRule(GraphLevel.ALWAYS),),
    implemented=True,
    note="rows do not depend on the rows beside them; on a CPU only in Triton's interpreter",
)

ROWS = (CPU_ATTN, TORCH_SDPA, TORCH_MLA, TRITON_MLA)
