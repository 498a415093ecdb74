"""DFlash and DSpark drafts in training: the body both share, the Markov head, the confidence head.

Equations: arXiv 2602.06036 (DFlash) and 2607.05147 (DSpark). Parameters are fp32 masters, products
run in the compute dtype, the residual stream in fp32. Embedding and head are the target's, frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from draft_svc.training.net import TargetNet
from draft_svc.training.spec import DraftSpec, shapes
from engine.attention.base import LayerMode
from engine.errors import CheckpointError
from engine.models.rope import Rope, rope_tables

# One entry of a projection moves many logits at once: this keeps the optimiser's steps small.
_PROJECTED = 0.1

BlockAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
ContextKV = list[tuple[Tensor, Tensor]]


class DraftNet:
    """One draft. `p` holds the parameters by export name; the Markov tables are a free part plus a
    projection of the target's embedding, so that rare tokens share what common ones learn (the
    sum is what is exported)."""

    def __init__(self, spec: DraftSpec, net: TargetNet, seed: int) -> None:
        self.spec, self.net = spec, net
        self.device, self.dtype = net.device, net.dtype
        c = net.config
        # A scaling of the target's RoPE is not the draft's: it has plain theta at all positions.
        self.rope = Rope(c.rope.theta, c.max_positions)
        tables = rope_tables(self.rope, spec.head_dim, c.max_positions)
        self.cos, self.sin = (table.to(net.device) for table in tables)
        generator = torch.Generator().manual_seed(seed)
        self.p: dict[str, Parameter] = {}
        for name, shape in shapes(spec, c).items():
            self.p[name] = Parameter(self._initial(name, shape, generator).to(self.device))
        if spec.rank:
            size = (spec.rank, c.hidden_size)
            start = torch.randn(size, generator=generator) / (_PROJECTED * self._embedding_norm())
            self.p["extra.markov_p1"] = Parameter(start.to(self.device))
            self.p["extra.markov_p2"] = Parameter(torch.zeros(size, device=self.device))
        # 1 / standard deviation of every tap channel; folded into fc at export.
        self.tap_scale = torch.ones(len(spec.taps) * c.hidden_size, device=self.device)

    def _embedding_norm(self) -> float:
        return float(self.net.embedding[:4096].float().norm(dim=-1).mean())

    def _initial(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        if name.startswith(("markov_head", "confidence_head")):
            return torch.zeros(shape)
        weight: Tensor = torch.randn(shape, generator=generator) / shape[1] ** 0.5
        deep = name.endswith(("o_proj.weight", "down_proj.weight"))
        return weight * (2 * self.spec.layers) ** -0.5 if deep else weight

    @property
    def parameters(self) -> list[Parameter]:
        return list(self.p.values())

    def _w(self, *names: str) -> Tensor:
        """The weights below each other, in the compute dtype."""
        parts = [self.p[name].to(self.dtype) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.p[name]
        eps = self.net.config.rms_eps
        normed: Tensor = F.rms_norm(x.float(), weight.shape, weight, eps)
        return normed.to(self.dtype)

    def fc_weight(self) -> Tensor:
        """What is exported: acts on raw taps."""
        weight: Tensor = self.p["fc.weight"] * self.tap_scale
        return weight

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, H, L, hd] at positions [B, L]."""
        c, s = self.cos[positions][:, None], self.sin[positions][:, None]
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1).to(self.dtype)

    def context(self, taps: Tensor, positions: Tensor) -> ContextKV:
        """taps [B, L, n * D] -> per layer K (normed, rotated) and V [B, kv_heads, L, head_dim]."""
        s = self.spec
        x = F.linear(taps.to(self.dtype), self.fc_weight().to(self.dtype))
        x = self._norm(x, "hidden_norm.weight")
        names = [
            f"layers.{i}.self_attn.{n}_proj.weight" for i in range(s.layers) for n in ("k", "v")
        ]
        both = F.linear(x, self._w(*names))
        batch, length = both.shape[:2]
        parts = both.view(batch, length, 2 * s.layers, s.kv_heads, s.head_dim).permute(
            2, 0, 3, 1, 4
        )
        kv = []
        for i in range(s.layers):
            k = self._norm(parts[2 * i], f"layers.{i}.self_attn.k_norm.weight")
            kv.append((self._rotate(k, positions), parts[2 * i + 1]))
        return kv

    def block(self, ids: Tensor, positions: Tensor, attend: BlockAttend) -> Tensor:
        """ids, positions int64 [B, Q] (whole blocks) -> final-norm states [B, Q, D].
        `attend(layer, q, k, v)` gets heads-first tensors of the block's own rows."""
        s = self.spec
        batch, count = ids.shape
        residual = self.net.embedding[ids].float()
        widths = [s.heads * s.head_dim, *[s.kv_heads * s.head_dim] * 2]
        for i in range(s.layers):
            prefix = f"layers.{i}"
            x = self._norm(residual, f"{prefix}.input_layernorm.weight")
            names = [f"{prefix}.self_attn.{n}_proj.weight" for n in ("q", "k", "v")]
            q, k, v = (
                part.view(batch, count, -1, s.head_dim).transpose(1, 2)
                for part in torch.split(F.linear(x, self._w(*names)), widths, -1)
            )
            q = self._rotate(self._norm(q, f"{prefix}.self_attn.q_norm.weight"), positions)
            k = self._rotate(self._norm(k, f"{prefix}.self_attn.k_norm.weight"), positions)
            y = attend(i, q, k, v).transpose(1, 2).reshape(batch, count, -1)
            residual = residual + F.linear(y, self._w(f"{prefix}.self_attn.o_proj.weight")).float()
            x = self._norm(residual, f"{prefix}.post_attention_layernorm.weight")
            both = self._w(f"{prefix}.mlp.gate_proj.weight", f"{prefix}.mlp.up_proj.weight")
            gate, up = F.linear(x, both).chunk(2, -1)
            down = F.linear(F.silu(gate) * up, self._w(f"{prefix}.mlp.down_proj.weight"))
            residual = residual + down.float()
        return self._norm(residual, "norm.weight")

    def markov(self) -> tuple[Tensor, Tensor]:
        """W1 and W2 [V, rank] in fp32, as exported."""
        tables = []
        for name, extra in (("markov_w1", "markov_p1"), ("markov_w2", "markov_p2")):
            projected = F.linear(self.net.embedding, self.p[f"extra.{extra}"].to(self.dtype))
            free = self.p[f"markov_head.{name}.weight"]
            tables.append(free + _PROJECTED * projected.float())
        return tables[0], tables[1]

    def confidence_logit(self, states: Tensor, previous: Tensor) -> Tensor:
        """states [T, D], Markov rows of the previous tokens [T, rank] -> fp32 [T]."""
        features = torch.cat((states.float(), previous.float()), -1)
        head = "confidence_head.proj"
        return F.linear(features, self.p[f"{head}.weight"], self.p[f"{head}.bias"])[:, 0]

    @torch.no_grad()
    def export_state(self) -> dict[str, Tensor]:
        """bf16 tensors of the checkpoint, on the CPU."""
        state = {n: p.detach() for n, p in self.p.items() if not n.startswith("extra.")}
        state["fc.weight"] = self.fc_weight()
        if self.spec.rank:
            w1, w2 = self.markov()
            state |= {"markov_head.markov_w1.weight": w1, "markov_head.markov_w2.weight": w2}
        return {n: t.to(torch.bfloat16).cpu().contiguous() for n, t in state.items()}

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continues from exported tensors; the tap scale must be set before."""
        wanted = {n: tuple(p.shape) for n, p in self.p.items() if not n.startswith("extra.")}
        optional = {n for n in wanted if n.startswith("confidence_head")}
        found = {n: tuple(t.shape) for n, t in state.items()}
        if {n: s for n, s in wanted.items() if n in found or n not in optional} != found:
            odd = sorted(set(wanted.items()) ^ set(found.items()))[:4]
            raise CheckpointError(f"the checkpoint to go on from has other tensors: {odd}")
        for name, tensor in state.items():
            self.p[name].copy_(tensor.to(self.device, torch.float32))
        self.p["fc.weight"].div_(self.tap_scale)
        for name in ("extra.markov_p1", "extra.markov_p2"):
            if name in self.p:
                self.p[name].zero_()


def fold(x: Tensor, kv_heads: int) -> Tensor:
    """q [B, H, Q, hd] -> [B, kv_heads, H / kv_heads * Q, hd]: the query heads of a KV head as
    rows, so that keys and values need no copies."""
    batch, heads, count, dim = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads * count, dim)


def visible(mode: LayerMode, anchors: Tensor, keys: Tensor, slots: int) -> Tensor:
    """Which context keys a slot sees: strictly before the anchor, and inside the window.

    anchors [B, A], keys [L] positions -> bool [B, A, slots, L].
    """
    before = (keys < anchors[..., None])[:, :, None]
    if mode.window is None:
        return before.expand(-1, -1, slots, -1)
    steps = torch.arange(slots, device=keys.device)
    lowest = anchors[..., None] + steps - mode.window + 1
    return before & (keys >= lowest[..., None])


def inside(mode: LayerMode, slots: int, device: torch.device) -> Tensor:
    """Which slots of its own block a slot sees, bool [slots, slots]."""
    steps = torch.arange(slots, device=device)
    gap = steps[:, None] - steps
    seen = torch.ones(slots, slots, dtype=torch.bool, device=device)
    if mode.causal:
        seen &= gap >= 0
    if mode.window is not None:
        seen &= gap.abs() < mode.window
    return seen


def block_attention(
    mode: LayerMode,
    context: ContextKV,
    anchors: Tensor,
    slots: int,
    reach: Sequence[int],
    dtype: torch.dtype,
) -> BlockAttend:
    """Attention of A blocks per document over (context before the anchor) + (own block).

    anchors int64 [B, A], rising in every row. `reach` [groups]: the blocks are cut into equal
    groups, and group g reads only the first reach[g] context keys, which must cover its anchors:
    the part of the mask that is all false is never computed.
    """
    batch, count = anchors.shape
    groups = len(reach)
    each = count // groups
    device = anchors.device
    own = torch.eye(each, dtype=torch.bool, device=device)[:, None, :, None]
    own = (own & inside(mode, slots, device)[None, :, None, :]).reshape(each * slots, each * slots)
    masks = []
    for g, limit in enumerate(reach):
        part = anchors[:, g * each : (g + 1) * each]
        keys = torch.arange(limit, device=device)
        far = visible(mode, part, keys, slots).reshape(batch, each * slots, limit)
        seen = torch.cat((far, own.expand(batch, -1, -1)), -1)
        bias = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -math.inf)
        masks.append(bias[:, None])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_context, v_context = context[layer]
        kv_heads, times = k.shape[1], q.shape[1] // k.shape[1]
        parts = []
        for g, limit in enumerate(reach):
            rows = slice(g * each * slots, (g + 1) * each * slots)
            keys = torch.cat((k_context[:, :, :limit], k[:, :, rows]), 2)
            values = torch.cat((v_context[:, :, :limit], v[:, :, rows]), 2)
            bias = masks[g].expand(-1, times, -1, -1).reshape(batch, 1, -1, keys.shape[2])
            y = F.scaled_dot_product_attention(
                fold(q[:, :, rows], kv_heads), keys, values, attn_mask=bias
            )
            parts.append(y.view(batch, q.shape[1], each * slots, -1))
        return torch.cat(parts, 2)

    return attend
