"""How a block draft is to run, and the attention backend that follows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.request import KVGroup
from engine.attention.resolution import Resolution
from engine.attention.select import AttentionOptions, resolve_attention
from engine.device import activation_dtype, kernel_mode
from engine.models.dflash_config import DFlashConfig
from engine.models.family import latent_of

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class DFlashOptions:
    """How to run a draft. `head_rows` drafts with the first rows of the head only (0: all);
    `int8_head` quantises them, on a CPU.
    """

    device: torch.device = CPU
    page_count: int = 2048
    page_tokens: int = 16
    kv_dtype: str = "auto"
    weight_dtype: torch.dtype = torch.bfloat16
    kernels: str = "auto"
    attention_backend: str | None = None
    cuda_graph_mode: str = "auto"
    head_rows: int = 0
    int8_head: bool = False


def choose_attention(
    config: DFlashConfig,
    options: DFlashOptions,
    method: str = "dflash",
    target: Resolution | None = None,
    group: KVGroup | None = None,
) -> Resolution:
    """The draft's own backend and KV, before anything is loaded. Raises AttentionRefused. `target`
    and `group`: of a draft in its target's pages, see `resolve_attention`.
    """
    mode = kernel_mode(options.kernels, options.device)
    return resolve_attention(
        AttentionOptions(
            options.attention_backend,
            options.kv_dtype,
            options.page_tokens,
            options.cuda_graph_mode,
        ),
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        modes=config.modes,
        native=mode == "native",
        latent=latent_of(config),
        role="draft",
        method=method,
        query_tokens=config.block_size,
        device=options.device,
        dtype=activation_dtype(mode, str(options.weight_dtype).removeprefix("torch.")),
        target=target,
        group=group,
        uncapturable="" if mode == "triton" else f"kernels {mode!r} draw a block on the host",
    )
