"""A DeepSeek target on a GPU, part of `python -m tests.engine.mla_checks`: graphs against launches,
verify widths, company, the reference operators; then the time of a step."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.api import Item
from engine.config import EngineConfig
from engine.errors import BackendUnavailable
from engine.loading import load_engine
from engine.runner import NativeEngine
from tests.engine import latent_engine_checks as checks
from tests.engine.latent_engine_checks import DEVICE, GREEDY, SAMPLED, texts
from tests.engine.tiny import run

MEDIUM: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 768, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "moe_intermediate_size": 704, "n_routed_experts": 32, "num_experts_per_tok": 4,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 8, "topk_group": 4,
    "initializer_range": 0.04, "max_position_embeddings": 4096, "rope_theta": 10000.0,
}  # fmt: skip
SMALL: dict[str, Any] = MEDIUM | {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 24,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
}  # fmt: skip
CONTEXT = 512
ON_GPU = DEVICE == "cuda"


def write(directory: Path, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        torch.set_default_dtype(torch.bfloat16)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **options))
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": []}))


def load(directory: Path, **options: Any) -> NativeEngine:
    base: dict[str, Any] = {
        "kernels": "triton", "attention_backend": "TRITON_MLA", "kv_memory_mb": 2048,
        "max_length": 1024, "page_tokens": 64, "device": DEVICE,
    }  # fmt: skip
    if not ON_GPU:
        base |= {"kv_memory_mb": 4, "max_length": 128, "page_tokens": 16, "dtype": "float32"}
    return load_engine(EngineConfig(model=str(directory), **(base | options)))


def ok(name: str, right: bool, more: str = "") -> bool:
    print(f"{'ok   ' if right else 'WRONG'} {name}{more and ': ' + more}", flush=True)
    return right


def same_texts(directory: Path, kv: str, tokens: int) -> Iterator[bool]:
    """Widths 1 to 8, one session and several, graphs or not: one text."""
    graphs = load(directory, kv_dtype=kv)
    eager = load(directory, kv_dtype=kv, cuda_graph_mode="NONE")
    report = graphs.attention
    print(f"{kv}: {report.chosen}, KV {report.kv_dtype}, graphs {report.graph_mode} {report.notes}")
    yield ok(f"{kv}: rows are independent", graphs.rows_independent)
    for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
        plain = texts(eager, sampling, 0, tokens, sessions=3)
        for drafts in range(8) if ON_GPU else (3,):
            found = texts(graphs, sampling, drafts, tokens, sessions=3)
            yield ok(f"{kv}, {name}, width {1 + drafts}: graphs equal launches", found == plain)
        alone = texts(graphs, sampling, 3, tokens, sessions=1)
        yield ok(f"{kv}, {name}: alone and in company", alone == plain[:1])


def near_torch(directory: Path) -> Iterator[bool]:
    """Logits of a text, against torch's operators in fp32."""
    ids = [(37 * i) % 90 + 4 for i in range(200 if ON_GPU else 24)]
    plain = load(directory, kernels="torch", attention_backend="TORCH_MLA", dtype="float32")
    reference = run(plain, [(plain.allocate(len(ids)), ids, 0)])[0][0].cpu()
    del plain
    for label, options in (
        ("TRITON_MLA", {}),
        ("TRITON_MLA over fp8", {"kv_dtype": "fp8"}),
        ("TORCH_MLA", {"attention_backend": "TORCH_MLA"}),
    ):
        engine = load(directory, **options)
        logits = run(engine, [(engine.allocate(len(ids)), ids, 0)])[0][0].cpu()
        error = float((logits - reference).norm() / reference.norm())
        best = reference.topk(2, dim=-1).values
        other = (logits.argmax(-1) != reference.argmax(-1)).nonzero()[:, 0]
        margin = float((best[other, 0] - best[other, 1]).max()) if len(other) else 0.0
        more = f"error {error:.1e}, other argmax at {len(other)} of {len(ids)} (margin {margin:.2f}"
        more += f" of a spread of {float(reference.std()):.2f})"
        yield ok(f"{label} against torch in fp32", error < 0.2, more)


def refusals(directory: Path) -> Iterator[bool]:
    """What cannot be captured runs without graphs and says why; asked for, it is refused."""
    asked = {"attention_backend": "TORCH_MLA"}, {"kernels": "torch"}
    for options in asked:
        report = load(directory, **options).attention
        right = report.graph_mode == "NONE" and bool(report.notes)
        yield ok(f"{options} without graphs", right, "; ".join(report.notes))
        try:
            load(directory, cuda_graph_mode="FULL_DECODE_ONLY", **options)
            yield ok(f"{options} refuses graphs", False)
        except BackendUnavailable as error:
            yield ok(f"{options} refuses graphs", True, str(error)[:160])


def step_ms(engine: NativeEngine, sessions: int, rows: int, repeats: int) -> float:
    context = CONTEXT if ON_GPU else 16
    tables = [engine.allocate(context + rows) for _ in range(sessions)]
    spent = []
    for _ in range(repeats):
        for table in tables:
            table.length = context
        items = [
            Item(t, [1] * rows, context, rows, GREEDY, context=[1] * (context + 1)) for t in tables
        ]
        began = time.perf_counter()
        engine.step(items)
        spent.append((time.perf_counter() - began) * 1e3)
    for table in tables:
        table.free()
    return statistics.median(spent[repeats // 4 :])


def times(directory: Path) -> Iterator[bool]:
    sizes = ((1, 1), (1, 4), (1, 8), (8, 1), (8, 8), (32, 1), (32, 8)) if ON_GPU else ((1, 2),)
    for label, options in (
        ("graphs", {}),
        ("graphs, fp8 KV", {"kv_dtype": "fp8"}),
        ("launches", {"cuda_graph_mode": "NONE"}),
        ("TORCH_MLA", {"attention_backend": "TORCH_MLA"}),
        ("torch", {"attention_backend": "TORCH_MLA", "kernels": "torch"}),
    ):
        engine = load(directory, **options)
        few = sizes if label.startswith("graphs") else sizes[:3]
        found = [f"{s}x{r} {step_ms(engine, s, r, 24 if ON_GPU else 1):.2f}" for s, r in few]
        print(f"{label}: ms of a step (sessions x rows, context {CONTEXT}): {', '.join(found)}")
        del engine
        if ON_GPU:
            torch.cuda.empty_cache()
    yield True


def large_experts() -> Iterator[bool]:
    """The widths of DeepSeek-V3, few experts of them."""
    sizes = (7168, 2048) if ON_GPU else (72, 40)
    c = checks.config("sigmoid", count=16, chosen=4, inner=sizes[1])
    for rows in (1, 8, 64):
        error = checks.expert_case(c, sizes[0], rows, torch.bfloat16)
        yield ok(f"experts of {sizes}, {rows} rows", error < 2e-2, f"{error:.1e}")


def outcomes() -> Iterator[bool]:
    for name in [name for name in vars(checks) if name.startswith("check_")]:
        getattr(checks, name)()
        yield ok(f"tiny: {name}", True)


def main() -> int:
    """Goes on after whatever fails; the number of failures."""
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write(directory, MEDIUM if ON_GPU else SMALL)
        tokens = 32 if ON_GPU else 3
        parts = (
            outcomes() if ON_GPU else iter(()), large_experts(),
            same_texts(directory, "auto", tokens), same_texts(directory, "fp8", tokens),
            near_torch(directory), refusals(directory) if ON_GPU else iter(()), times(directory),
        )  # fmt: skip
        for part in parts:
            began = time.monotonic()
            try:
                failed += sum(not right for right in part)
            except Exception as error:  # one part must not hide the others
                failed += 1
                print(f"WRONG {part.__name__}: {type(error).__name__}: {str(error)[:1500]}")
            print(f"      ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"DeepSeek target on {DEVICE}: {failed} wrong")
    return failed


if __name__ == "__main__":
    raise SystemExit(main() > 0)
