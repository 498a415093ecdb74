"""Options that several commands share, and what they have in common when they reach a server."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from coordinator.local import LocalDeployment, LocalOptions
from coordinator.runtime_file import running_address
from coordinator.signals import terminated_cleanly
from specwire.errors import SpecwireError
from specwire.sampling import MAX_CHOICES

Address = Annotated[
    str,
    typer.Option(
        envvar="SPECWIRE_ADDRESS",
        help="Coordinator: host:port or unix:/path. Unset: a deployment started by `specwire up`, "
        "or one of its own for the duration of the command.",
    ),
]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens to generate.")]
Temperature = Annotated[
    float | None, typer.Option(min=0.0, help="0 is greedy. Unset: the server's default, 1.0.")
]
TopK = Annotated[int | None, typer.Option(min=0, help="Keep the K likeliest tokens; 0: all.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest share of tokens: (0, 1].")]
MinP = Annotated[
    float | None,
    typer.Option(help="Drop tokens below this share of the likeliest one's probability: [0, 1]."),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Above 1 makes tokens of prompt and answer less likely: (0, 10]."),
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Taken once from each token of the answer so far: [-2, 2].")
]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="Taken per occurrence in the answer so far: [-2, 2].")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(metavar="ID=VALUE", help="Added to a token's logit; may be given several times."),
]
BadWord = Annotated[
    list[str] | None,
    typer.Option(help="The answer must not have this word; may be given several times."),
]
MinTokens = Annotated[
    int | None, typer.Option(min=0, help="The answer does not end before so many tokens.")
]
Choices = Annotated[
    int | None, typer.Option("-n", min=1, max=MAX_CHOICES, help="Answers to this prompt.")
]
Seed = Annotated[
    int | None, typer.Option(min=0, help="Same seed, same tokens, whichever drafter is attached.")
]
Stop = Annotated[
    list[str] | None, typer.Option(help="End before this text; may be given several times.")
]
StopTokenId = Annotated[
    list[int] | None, typer.Option(min=0, help="End with this token; may be given several times.")
]
IncludeStop = Annotated[
    bool, typer.Option("--include-stop", help="Keep the text that ended the answer in it.")
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on behind the model's end-of-text token.")
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        min=0, help="With --json: log probability of each token, and so many alternatives."
    ),
]
PromptLogprobs = Annotated[
    int | None, typer.Option(min=0, help="With --json: the same for the tokens of the prompt.")
]
Priority = Annotated[
    int | None, typer.Option(help="Lower comes first where requests compete for the target.")
]
Method = Annotated[
    str,
    typer.Option(
        help="`plain`, or a drafter: `dflash`, `ngram`, `hybrid`, `draft_model`; NAME@colocated or "
        "NAME@separate where it is in both places. Unset: the default one."
    ),
]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens", "-k", min=0, help="Draft tokens a round. Unset: the server's."
    ),
]
Exactness = Annotated[
    str,
    typer.Option(
        help="`exact`: speculation never changes a token. `fast`: kernel shapes follow the work. "
        "Unset: the server's default."
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout", metavar="SECONDS", help="Longest time of the answer. Unset: no limit."
    ),
]


def biases(given: list[str] | None) -> dict[int, float]:
    """Of `ID=VALUE` each."""
    found: dict[int, float] = {}
    for text in given or ():
        token, _, value = text.partition("=")
        try:
            found[int(token)] = float(value)
        except ValueError:
            raise SpecwireError.field("--logit-bias", text, "ID=VALUE, as 42=-1.5") from None
    return found


# Fields of a request whose option has another name.
_FLAGS = {
    "n": "-n",
    "bad_words": "--bad-word",
    "stop_token_ids": "--stop-token-id",
    "timeout_s": "--timeout",
}


@contextmanager
def named_as_options(given: Collection[str]) -> Iterator[None]:
    """Errors about a field of a request name the option that it is from, where it is `given`."""
    try:
        yield
    except SpecwireError as error:
        field = error.metadata.get("field", "")
        name = field.rpartition(".")[2].partition("[")[0]
        if name not in given or not error.message.startswith(f"{field} "):
            raise
        flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
        message = flag + error.message.removeprefix(field)
        raise SpecwireError(error.reason, message, {**error.metadata, "field": flag}) from error


def say(line: str) -> None:
    """Progress and remarks go to stderr: stdout is for results."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def coordinator_address(address: str) -> Iterator[str]:
    """The address given, or a running default deployment, or an own one for this block."""
    found = address or running_address()
    if found:
        yield found
        return
    with terminated_cleanly(), LocalDeployment(LocalOptions(), say) as deployment:
        yield deployment.address


def colour_wanted() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
