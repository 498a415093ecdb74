"""The packaged model in fp32: 64 greedy tokens on ten prompts, equal to transformers."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from engine.api import Item, Sampling
from engine.config import EngineConfig
from engine.default_model import resolve_model, tokenizer_document
from engine.loading import load_engine
from engine.runner import NativeEngine

PROMPTS = [
    "Name three rivers in Europe.",
    "Write a haiku about rain.",
    "What is 17 plus 25?",
    "Explain in one sentence why ice floats.",
    "Write a Python function that reverses a string.",
    "Translate 'good morning' into French.",
    "Who wrote Romeo and Juliet?",
    "List the steps to boil an egg.",
    "If a train travels 60 km in 45 minutes, what is its speed?",
    "Summarise the story of the tortoise and the hare.",
]
TOKENS = 64


def generate(engine: NativeEngine, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy decoding of all prompts together, `TOKENS` each, eos or not."""
    greedy = Sampling(temperature=0.0)
    tables = [engine.allocate(len(ids) + TOKENS) for ids in prompts]
    texts = [list(ids) for ids in prompts]
    for step in range(TOKENS):
        items = []
        for table, ids in zip(tables, texts, strict=True):
            new = ids if step == 0 else ids[-1:]
            items.append(Item(table, new, len(ids) - len(new), 1, greedy))
        for ids, result in zip(texts, engine.step(items), strict=True):
            ids += result.tokens
    return texts


@pytest.mark.model
def test_greedy_tokens_equal_transformers() -> None:
    document = json.loads(tokenizer_document("default"))
    tokenizer = Tokenizer.from_str(json.dumps(document["tokenizer"]))
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    prompts = [tokenizer.encode(turn.format(text)).ids for text in PROMPTS]
    engine = load_engine(EngineConfig(dtype="float32", kv_memory_mb=128))
    texts = generate(engine, prompts)
    directory = resolve_model("default").directory
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for prompt, ids in zip(prompts, texts, strict=True):
        # Every token must be the reference's argmax given the tokens before it: greedy decoding.
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == ids[len(prompt) :]
