"""Step times of the native engine on this machine, and plain decoding against transformers in one
run.

python -m tests.load.bench_engine: the two take turns prompt by prompt; medians after a warm-up;
read the ratio.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from engine.api import Item, Sampling
from engine.config import EngineConfig
from engine.default_model import resolve_model, tokenizer_document
from engine.loading import load_engine

PROMPTS = (
    "Explain to a ten-year-old why the sea is salty.",
    "A baker sells 14 loaves a day for 3 dollars each. What does she earn in a week?",
    "Write a Python function that reverses the words of a sentence.",
)
TOKENS = 64
GREEDY = Sampling(temperature=0.0)


def timed(run: Callable[[], None]) -> float:
    begun = time.perf_counter()
    run()
    return (time.perf_counter() - begun) * 1e3


def main() -> None:
    engine = load_engine(EngineConfig(model="default"))
    document = json.loads(tokenizer_document("default"))
    tokenizer = Tokenizer.from_str(json.dumps(document["tokenizer"]))
    peer = AutoModelForCausalLM.from_pretrained(
        resolve_model("default").directory, dtype=torch.bfloat16
    ).eval()
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]

    def ours(ids: list[int]) -> None:
        table = engine.allocate(len(ids) + TOKENS)
        token = engine.step([Item(table, ids, 0, 1, GREEDY)])[0].tokens[0]
        for position in range(len(ids), len(ids) + TOKENS - 1):
            token = engine.step([Item(table, [token], position, 1, GREEDY)])[0].tokens[0]
        table.free()

    def theirs(ids: list[int]) -> None:
        inputs = torch.tensor([ids])
        with torch.inference_mode():
            peer.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
                do_sample=False,
            )

    ours(prompts[0]), theirs(prompts[0])
    pairs = [(timed(partial(ours, ids)), timed(partial(theirs, ids))) for ids in prompts * 3]
    mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(f"{torch.get_num_threads()} threads, {TOKENS} tokens, greedy, batch 1")
    print(f"specwire engine    {TOKENS / mine * 1e3:6.1f} tokens/s")
    print(f"transformers bf16  {TOKENS / other * 1e3:6.1f} tokens/s")
    print(f"ratio              {other / mine:6.2f}")
    table = engine.allocate(512)
    engine.step([Item(table, prompts[0] * 10, 0, 0, GREEDY)])
    length = table.length
    for width in (1, 2, 4, 6, 8):

        def verify(width: int = width) -> None:
            table.truncate(length)
            engine.step([Item(table, list(range(100, 100 + width)), length, width, GREEDY)])

        times = [timed(verify) for _ in range(25)]
        print(f"step of {width} rows at context {length}: {statistics.median(times[5:]):6.1f} ms")


if __name__ == "__main__":
    main()
