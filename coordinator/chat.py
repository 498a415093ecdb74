"""`specwire chat`: a conversation, with what the drafter guessed right set apart."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from coordinator import options as opt
from coordinator.talk import PLAIN, Show, print_choices, shower, statistics_line, stream_text
from specwire.client import Client, Delta, GenerateOptions
from specwire.errors import SpecwireError

# A line that is one word after a slash, or begins with a command; `/etc/hosts` is text.
_COMMAND = re.compile(r"/\w+|/(help|reset|exit|quit)\s.*")
Messages = list[Mapping[str, str]]
_ENDS = ("/exit", "/quit")
_AGAIN = "Ctrl-C again, Ctrl-D or /quit leaves"
_HELP = """/help   this list
/reset  forget the conversation
/exit   end, as /quit and Ctrl-D
Ctrl-C ends an answer, and twice at the prompt the conversation
Every other line goes to the model, and one behind a space whatever it is"""


def chat(
    system: Annotated[
        str, typer.Option(help="System prompt. Unset: the default of the model's template.")
    ] = "",
    max_tokens: opt.MaxTokens = 512,
    temperature: opt.Temperature = None,
    top_k: opt.TopK = None,
    top_p: opt.TopP = None,
    min_p: opt.MinP = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    presence_penalty: opt.PresencePenalty = None,
    frequency_penalty: opt.FrequencyPenalty = None,
    seed: opt.Seed = None,
    n: opt.Choices = None,
    stop: opt.Stop = None,
    method: opt.Method = "",
    num_speculative_tokens: opt.DraftTokens = None,
    mark: Annotated[
        str,
        typer.Option(help="Accepted draft tokens: `colour`, `brackets`, `none`, or `auto`."),
    ] = "auto",
    address: opt.Address = "",
) -> None:
    """Talk with the model. Text that the drafter guessed right is shown in green.

    /reset forgets the conversation, /exit (or Ctrl-D) ends it, /help lists what else there is;
    Ctrl-C ends an answer, and twice at the prompt the conversation. A line behind a space goes to
    the model whatever it is. With -n the conversation goes on with the first answer. Where the
    server is busy, ask again.

    Examples:

    \b
      specwire chat
      specwire chat --temperature 0 --method ngram --mark brackets
      specwire chat --address 127.0.0.1:7070 --system "Answer in one sentence."
    """
    show = shower(mark)
    start: Messages = [{"role": "system", "content": system}] if system else []
    request: GenerateOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        "n": n,
        "stop": stop or (),
        "method": method,
        "num_speculative_tokens": num_speculative_tokens,
    }
    with (
        opt.named_as_options(tuple(request)),
        opt.coordinator_address(address) as found,
        Client(found) as client,
    ):
        client.info()  # a bad address is an error now, not after the first question
        if sys.stdin.isatty():
            opt.say("/help lists the commands")
        answered = _converse(client, request, start, show)
    if not (answered or sys.stdin.isatty()):
        raise typer.Exit(1)


def _converse(client: Client, request: GenerateOptions, start: Messages, show: Show) -> bool:
    """Until the user ends it; whether every question had an answer. An error after which it helps
    to ask again is said and forgotten, and so is the question."""
    messages, answered = list(start), True
    while (line := _read_line()) not in _ENDS:
        if line == "/reset":
            messages = list(start)
        elif line == "/help":
            opt.say(_HELP)
        elif _COMMAND.fullmatch(line):
            opt.say(_misused(line))
        elif question := line.strip():
            asked: Messages = [*messages, {"role": "user", "content": question}]
            request["messages"] = asked
            try:
                answer = _answer(client, request, show)
            except SpecwireError as error:
                if not error.retry_after_ms:
                    raise
                print(PLAIN if opt.colour_wanted() else "")
                opt.say(f"error: {error.message}")
                answered = False
                continue
            if answer:
                messages = [*asked, {"role": "assistant", "content": answer}]
    return answered


def _misused(line: str) -> str:
    command, *arguments = line.split(maxsplit=1)
    problem = f"{command} takes no arguments" if arguments else f"there is no {command}"
    return f"{problem}; /help lists the commands, a space before it sends it"


def _read_line() -> str:
    """A line as it was typed, but for the space behind it. At a terminal one Ctrl-C is taken for
    one that came too late to end an answer, and drops only what was typed."""
    interactive = sys.stdin.isatty()
    for hint in (_AGAIN, ""):
        try:
            return input("you> " if interactive else "").rstrip()
        except EOFError:
            break
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()
            if hint:
                opt.say(hint)
    return "/exit"


def _answer(client: Client, request: GenerateOptions, show: Show) -> str:
    """The answer, or the first of several; as far as it came where Ctrl-C ended it."""
    parts: list[str] = []

    def shown(delta: Delta) -> str:
        parts.append(delta.text)
        return show(delta)

    try:
        if (request.get("n") or 1) > 1:
            several = client.generate(**request)
            print_choices(several)
            return several.choices[0].text
        with client.stream(**request) as stream:
            _, finished = stream_text(stream, shown)
        opt.say(statistics_line(finished))
    except KeyboardInterrupt:
        print(PLAIN if opt.colour_wanted() else "")
    return "".join(parts)
