"""`specwire generate`: text in, text out, and what speculation did for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Annotated

import typer

from coordinator import options as opt
from specwire.client import Client, Delta, Event, Finished, GenerateOptions, Generation
from specwire.errors import SpecwireError
from specwire.generation import collect

ACCEPTED = "\x1b[32m"
PLAIN = "\x1b[0m"
Show = Callable[[Delta], str]


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; `-` reads it from stdin.")],
    chat_template: Annotated[
        bool, typer.Option("--chat", help="Send the text as one user turn of a chat.")
    ] = False,
    max_tokens: opt.MaxTokens = 256,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    presence_penalty: opt.PresencePenalty = None,
    frequency_penalty: opt.FrequencyPenalty = None,
    logit_bias: opt.LogitBias = None,
    bad_word: opt.BadWord = None,
    min_tokens: opt.MinTokens = None,
    seed: opt.Seed = None,
    n: opt.Choices = None,
    stop: opt.Stop = None,
    stop_token_id: opt.StopTokenId = None,
    include_stop: opt.IncludeStop = False,
    ignore_eos: opt.IgnoreEos = False,
    logprobs: opt.Logprobs = None,
    prompt_logprobs: opt.PromptLogprobs = None,
    priority: opt.Priority = None,
    method: opt.Method = "",
    num_speculative_tokens: opt.DraftTokens = None,
    exactness: opt.Exactness = "",
    timeout: opt.Timeout = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object with text, ids and acceptance record.")
    ] = False,
    address: opt.Address = "",
) -> None:
    """Continue a text. The text goes to stdout as it comes, a line of statistics to stderr.

    Examples:

    \b
      specwire generate --max-tokens 40 "The harbour at dawn"
      specwire generate --chat --temperature 0.8 --seed 7 "Explain tides to a child"
      specwire generate -n 3 --temperature 1.2 --min-p 0.05 --bad-word sea "The harbour at dawn"
      specwire generate --json --logprobs 3 --max-tokens 8 "The capital of France is"
      git diff | specwire generate --chat --method plain --json -
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise SpecwireError.field("PROMPT", "", "a text that is not empty")
    for name, value in (("--logprobs", logprobs), ("--prompt-logprobs", prompt_logprobs)):
        if value is not None and not as_json:
            raise SpecwireError.field(name, value, "only together with --json")
    request: GenerateOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logit_bias": opt.biases(logit_bias),
        "bad_words": bad_word or (),
        "min_tokens": min_tokens,
        "seed": seed,
        "n": n,
        "stop": stop or (),
        "stop_token_ids": stop_token_id or (),
        "include_stop": include_stop,
        "ignore_eos": ignore_eos,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "priority": priority,
        "method": method,
        "num_speculative_tokens": num_speculative_tokens,
        "exactness": exactness,
        "timeout_s": timeout,
    }
    from_options = tuple(request)
    if chat_template:
        request["messages"] = [{"role": "user", "content": text}]
    else:
        request["prompt"] = text
    with (
        opt.named_as_options(from_options),
        opt.coordinator_address(address) as found,
        Client(found) as client,
    ):
        if as_json:
            print(json.dumps(asdict(client.generate(**request)), ensure_ascii=False))
            return
        if n is not None and n > 1:
            print_choices(client.generate(**request))
            return
        with client.stream(**request) as stream:
            _, finished = stream_text(stream, lambda delta: delta.text)
    opt.say(statistics_line(finished))


def print_choices(generation: Generation) -> None:
    """Several answers, one after another: they are not streamed."""
    for answer in generation.choices:
        print(f"--- {answer.choice}")
        print(answer.text)
        opt.say(statistics_line(answer))


def stream_text(events: Iterable[Event], show: Show) -> tuple[str, Finished]:
    """Prints deltas as they come; returns the whole text and the final event. What came stays
    where the rest is missing, in a line of its own."""
    kept: list[Event] = []
    try:
        for event in events:
            kept.append(event)
            if isinstance(event, Delta):
                print(show(event), end="", flush=True)
    except SpecwireError:
        if kept:
            print(flush=True)
        raise
    print()
    finished = kept[-1]
    assert isinstance(finished, Finished)  # the client raises when the final message is missing
    return collect(kept).text, finished


def shower(mark: str) -> Show:
    """How a delta is shown: what was accepted is set apart."""
    kinds = {"colour": (ACCEPTED, PLAIN), "brackets": ("[", "]"), "none": ("", "")}
    kind = ("colour" if opt.colour_wanted() else "none") if mark == "auto" else mark
    if kind not in kinds:
        raise SpecwireError.field("--mark", mark, "auto, colour, brackets, none")
    before, after = kinds[kind]

    def show(delta: Delta) -> str:
        shown, at = "", 0
        for span in delta.accepted:
            end = span.start_char + span.chars
            shown += delta.text[at : span.start_char]
            shown += f"{before}{delta.text[span.start_char : end]}{after}" if span.chars else ""
            at = end
        return shown + delta.text[at:]

    return show


def statistics_line(finished: Finished | Generation) -> str:
    record, tokens = finished.acceptance, finished.usage.completion_tokens
    speed = tokens / record.total_ms * 1e3 if record.total_ms else 0.0
    parts = [f"{tokens} tokens", f"{speed:.1f} tokens/s", record.method or "plain"]
    if record.draft_tokens:
        accepted = f"{record.accepted_tokens}/{record.draft_tokens}"
        parts += [f"tau {record.tau:.2f}", f"{accepted} draft tokens accepted"]
    parts += [f"seed {finished.sampling.seed}", str(finished.finish_reason)]
    return "[" + ", ".join(parts) + "]"
