"""DeepSeek targets on Triton's kernels: every kernel against torch, and whole texts. Under the
interpreter in test_latent_engine.py; `mla_checks` runs them on a GPU too."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from engine.api import Item, Sampling
from engine.attention.kernels.latent_heads import head_values, latent_queries
from engine.kernels.triton import experts as routed
from engine.kernels.triton import router
from engine.models.experts import route
from engine.models.latent_config import ExpertsConfig
from engine.models.layers import RopeTables
from engine.models.mla import Absorbed
from engine.models.rope import Rope, rope_tables
from engine.runner import NativeEngine
from tests.engine.tiny import LATENT, load_tiny, random_ids, run, write_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.8, "rope_theta": 5000.0,
}  # fmt: skip
# One layer: the interpreter is slow.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2 dense": ("deepseek_v2", LATENT | {"first_k_dense_replace": 1, "q_lora_rank": 28}),
    "v3": (
        "deepseek_v3",
        LATENT
        | {"first_k_dense_replace": 0, "n_group": 4, "topk_group": 2, "q_lora_rank": 28}
        | {"rope_parameters": YARN},
    ),
}
GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling(temperature=0.8, seed=7, top_p=0.9)


def config(scoring: str, **changes: Any) -> ExpertsConfig:
    options = {
        "first_layer": 0, "count": 24, "chosen": 5, "inner": 36, "shared": 1, "groups": 4,
        "kept_groups": 2, "scoring": scoring, "normed": scoring == "sigmoid", "factor": 2.5,
    }  # fmt: skip
    return ExpertsConfig(**(options | changes))


def routed_of(
    c: ExpertsConfig, logits: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return router.route(
        logits, bias, c.chosen, c.groups, c.kept_groups, c.scoring == "sigmoid", c.normed, c.factor
    )


def check_routes_are_those_of_torch() -> None:
    torch.manual_seed(3)
    for c in (config("sigmoid"), config("softmax"), config("softmax", groups=1, kept_groups=1)):
        logits = torch.randn(37, c.count, device=DEVICE)
        bias = torch.randn(c.count, device=DEVICE) if c.scoring == "sigmoid" else None
        weights, chosen = routed_of(c, logits, bias)
        expected, ids = route(c, logits, bias)
        assert torch.equal(chosen.long(), ids)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def check_groups_hold_every_pair_once() -> None:
    """Few rows, many rows, all rows with one expert."""
    torch.manual_seed(4)
    for rows, top, count in ((1, 3, 8), (5, 8, 256), (150, 3, 8), (40, 1, 3)):
        scores = torch.rand(rows, count)
        if top == 1:
            scores[:, 1] = 2.0
        chosen = scores.topk(top, dim=-1).indices.int().to(DEVICE)
        made = routed.group(chosen, count)
        tiles, order = made.tiles.cpu().tolist(), made.order.cpu().tolist()
        held = []
        for expert, first, size, _ in tiles:
            assert 0 <= size <= 16
            pairs = order[first : first + size]
            held += pairs
            assert all(chosen.flatten()[pair] == expert for pair in pairs)
        assert sorted(held) == list(range(rows * top))


def expert_case(c: ExpertsConfig, hidden: int, rows: int, dtype: torch.dtype) -> float:
    """Error against fp64, as a part of the largest value. A row alone has the same bits."""
    torch.manual_seed(5)
    up = (torch.randn(c.count, 2 * c.inner, hidden, device=DEVICE) / hidden**0.5).to(dtype)
    down = (torch.randn(c.count, hidden, c.inner, device=DEVICE) / c.inner**0.5).to(dtype)
    x = torch.randn(rows, hidden, device=DEVICE).to(dtype)
    bias = torch.zeros(c.count, device=DEVICE)
    weights, chosen = routed_of(c, torch.randn(rows, c.count, device=DEVICE), bias)
    start = torch.randn(rows, hidden, device=DEVICE)

    def added(first: int, end: int) -> torch.Tensor:
        out, groups = (
            start[first:end].clone(),
            routed.group(chosen[first:end].contiguous(), c.count),
        )
        found = routed.down(routed.gate_up(x[first:end], groups, up, c.chosen), groups, down)
        routed.add_weighted(found, weights[first:end].contiguous(), out)
        return out

    expected = start.double()
    for row in range(rows):
        for share, e in zip(weights[row].tolist(), chosen[row].tolist(), strict=True):
            gate, other = (up[e].double() @ x[row].double()).chunk(2)
            inner = torch.nn.functional.silu(gate) * other
            expected[row] += share * (down[e].double() @ inner)
    whole = added(0, rows)
    assert torch.equal(added(rows - 1, rows)[0], whole[rows - 1])
    return float((whole.double() - expected).abs().max() / expected.abs().max())


def check_experts_are_those_of_torch() -> None:
    """Odd widths, rows below and above a tile."""
    c = config("sigmoid", count=8, chosen=3, inner=40)
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for rows in (3, 40):
            error = expert_case(c, 72, rows, dtype)
            assert error < limit, (dtype, rows, error)


def check_products_by_head_are_those_of_torch() -> None:
    torch.manual_seed(6)
    cos, sin = (table.to(DEVICE) for table in rope_tables(Rope(500.0, 64), 6, 64))
    for heads, nope, rank, value, rows in ((3, 20, 40, 12, 5), (4, 130, 70, 70, 33)):
        into = torch.randn(heads, nope, rank, device=DEVICE)
        out = torch.randn(heads, rank, value, device=DEVICE)
        plain, rope = Absorbed(into, out), RopeTables(cos, sin)
        positions = torch.randint(64, (rows,), device=DEVICE, dtype=torch.int32)
        x = torch.randn(rows, heads * (nope + 6) + 9, device=DEVICE)[:, 4:-5]
        x = x.unflatten(1, (heads, nope + 6))
        found = latent_queries(x, into, cos, sin, positions)
        torch.testing.assert_close(found, plain.queries(x, rope, positions), rtol=1e-4, atol=1e-4)
        alone = latent_queries(x[2:3], into, cos, sin, positions[2:3])
        assert torch.equal(alone[0], found[2])
        y = torch.randn(rows, heads, rank, device=DEVICE)
        torch.testing.assert_close(head_values(y, out), plain.values(y), rtol=1e-4, atol=1e-4)


def texts(
    engine: NativeEngine, sampling: Sampling, drafts: int, count: int, sessions: int = 2
) -> list[list[int]]:
    """Tokens of every session, with guesses that are right now and then."""
    prompts = [[(7 * i + 3 * n) % 80 + 5 for i in range(9 + 5 * n)] for n in range(sessions)]
    tables = [engine.allocate(0) for _ in prompts]
    ids = [list(prompt) for prompt in prompts]
    items = [
        Item(table, prompt, 0, 1, sampling, context=prompt, prompt_len=len(prompt))
        for table, prompt in zip(tables, prompts, strict=True)
    ]
    for own, result in zip(ids, engine.step(items), strict=True):
        own += result.tokens
    while min(len(y) - len(p) for y, p in zip(ids, prompts, strict=True)) < count:
        items = [
            Item(
                table, [y[-1], *(y[-1 - d] for d in range(drafts))], len(y) - 1, 1 + drafts,
                sampling, taps=(0,), context=y, prompt_len=len(prompt),
            )
            for table, y, prompt in zip(tables, ids, prompts, strict=True)
        ]  # fmt: skip
        for own, result in zip(ids, engine.step(items), strict=True):
            own += result.tokens
    engine.check_integrity()
    for table in tables:
        table.free()
    return [y[len(p) : len(p) + count] for y, p in zip(ids, prompts, strict=True)]


def engine_of(folder: str, kernels: str, backend: str, kv: str = "auto") -> NativeEngine:
    found = load_tiny(
        Path(folder), kernels, attention_backend=backend, kv_dtype=kv, max_length=64, kv_pages=24,
        device=DEVICE,
    )  # fmt: skip
    assert found.attention.chosen == backend
    return found


def variant(folder: str, name: str) -> None:
    family, options = VARIANTS[name]
    write_model(Path(folder), family, num_hidden_layers=1, **options)


def same_text(name: str, backend: str, sampling: Sampling, drafts: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        variant(folder, name)
        plain, own = engine_of(folder, "torch", "TORCH_MLA"), engine_of(folder, "triton", backend)
        assert own.rows_independent == (backend == "TRITON_MLA")
        expected = texts(plain, sampling, 0, 4)
        assert texts(own, sampling, drafts, 4) == expected, name


def check_a_dense_text_is_that_of_torch() -> None:
    same_text("v2 dense", "TRITON_MLA", GREEDY, 2)


def check_a_text_with_experts_is_that_of_torch() -> None:
    same_text("v3", "TRITON_MLA", SAMPLED, 2)


def check_torch_attention_takes_the_kernels_queries() -> None:
    same_text("v3", "TORCH_MLA", GREEDY, 1)


def check_drafts_change_nothing_over_fp8() -> None:
    """Between two values of the format either is right, so torch's text is not asked for: logits
    near it are."""
    with tempfile.TemporaryDirectory() as folder:
        variant(folder, "v2 dense")
        plain = engine_of(folder, "torch", "TORCH_MLA", "fp8")
        own = engine_of(folder, "triton", "TRITON_MLA", "fp8")
        assert own.attention.kv_dtype == "fp8_ds_mla" and own.rows_independent
        ids = random_ids(20)
        expected, found = (run(e, [(e.allocate(24), ids, 0)])[0][0] for e in (plain, own))
        error = float((found - expected).norm() / expected.norm())
        assert error < 0.1, error
        own = engine_of(folder, "triton", "TRITON_MLA", "fp8")
        assert texts(own, GREEDY, 2, 4) == texts(own, GREEDY, 0, 4)
