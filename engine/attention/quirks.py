"""Combinations that are declared and still known to be bad, each with its public reference."""

from __future__ import annotations

from dataclasses import dataclass

from engine.attention.devices import ANY_GPU, ANYWHERE, SM100, SM121, DeviceProfile, Range, covered
from engine.attention.mode import LayerMode


@dataclass(frozen=True, slots=True)
class Quirk:
    """None matches both. `denies`: the combination is refused, else the operator is warned.

    `block`: the layers run several query tokens a request. `draft`: for drafts, or for targets,
    only.
    """

    backend: str
    text: str
    reference: str
    denies: bool
    on: tuple[Range, ...] = ANYWHERE
    causal: bool | None = None
    windowed: bool | None = None
    dcp: bool | None = None
    block: bool | None = None
    draft: bool | None = None
    engine: str = "vllm"


QUIRKS = (
    Quirk(
        "FLASH_ATTN",
        "device assert in FlashAttention 2 with non-causal layers",
        "vllm#50707",
        denies=True,
        on=(SM121,),
        causal=False,
    ),
    Quirk(
        "FLASHMLA",
        "the dense kernel is made for Hopper, although 10.x is declared",
        "vLLM 0.33.0, v1/attention/backends/mla/flashmla.py",
        denies=True,
        on=(SM100,),
    ),
    Quirk(
        "FLASHINFER",
        "non-causal drafts had near-zero acceptance or illegal accesses in captured graphs",
        "vllm#48167",
        denies=False,
        on=(SM100,),
        causal=False,
    ),
    Quirk(
        "FLASH_ATTN",
        "windowed drafts accept about one token unless the ahead-of-time schedule is off",
        "vllm#54374",
        denies=False,
        on=(ANY_GPU,),
        windowed=True,
        draft=True,
    ),
    Quirk(
        "TRITON_MLA",
        "its source asserts dcp = 1 where it decodes a causal block of several tokens; released "
        "versions run such blocks as prefill, at a cost",
        "vllm#52218, vllm#50391",
        denies=False,
        causal=True,
        dcp=True,
        block=True,
        draft=False,
    ),
)


def quirks_for(
    backend: str,
    engine: str,
    device: DeviceProfile,
    mode: LayerMode,
    *,
    dcp: int,
    block: bool,
    draft: bool,
) -> list[Quirk]:
    """The quirks that apply to layers of one mode."""
    is_ = (mode.causal, mode.window is not None, dcp > 1, block, draft)
    found = []
    for quirk in QUIRKS:
        wanted = (quirk.causal, quirk.windowed, quirk.dcp, quirk.block, quirk.draft)
        here = quirk.backend == backend and quirk.engine == engine and covered(quirk.on, device)
        if here and all(want in (None, has) for want, has in zip(wanted, is_, strict=True)):
            found.append(quirk)
    return found
