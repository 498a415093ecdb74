"""What every command begins with: the target's network and its text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from draft_svc.training.chat import Chat, load_chat, prompt_ids, read_prompts
from draft_svc.training.evaluate import EvalPrompt
from draft_svc.training.net import TargetNet, load_target
from engine.errors import CheckpointError

# How the text of a prompt reaches the target: as a user's turn, or as it is.
TEMPLATES = ("chat", "none")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def say(line: str) -> None:
    print(line, flush=True)


def target_directory(reference: str) -> Path:
    """A directory as it is; a GGUF file or "default" through the importer (needs `gguf`)."""
    path = Path(reference).expanduser()
    if path.is_dir():
        return path
    from engine.default_model import resolve_model

    return resolve_model(reference).directory


def open_target(args: argparse.Namespace) -> tuple[Path, TargetNet, Chat | None]:
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = DTYPES[args.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    directory = target_directory(args.target)
    try:
        chat: Chat | None = load_chat(directory)
    except CheckpointError as error:
        say(f"no chat: {error}")
        chat = None
    net = load_target(directory, device, dtype)
    say(f"target {directory.name}: {net.config.layer_count} layers on {device}, {dtype}")
    return directory, net, chat


def stop_ids(net: TargetNet, chat: Chat | None) -> tuple[int, ...]:
    return net.config.eos_token_ids or (chat.eos_ids if chat else ())


def eval_prompts(
    path: Path,
    chat: Chat | None,
    per_set: int,
    categories: Sequence[str] = (),
    template: str = "chat",
) -> list[EvalPrompt]:
    """The first `per_set` prompts (0: all) of every category of a prompt file."""
    taken: dict[str, int] = {}
    found = []
    for row in read_prompts(path):
        name = str(row.get("category", "all"))
        if categories and name not in categories:
            continue
        if per_set and taken.get(name, 0) >= per_set:
            continue
        taken[name] = taken.get(name, 0) + 1
        ids = prompt_ids(chat, row, template != "none")
        found.append(EvalPrompt(name if template == "chat" else f"{name}, no template", ids))
    return found
