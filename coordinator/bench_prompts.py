"""Prompt files of `specwire bench`: one JSON object a line; errors name line and field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specwire.errors import SpecwireError

ROLES = ("system", "user", "assistant")
DEFAULT_CATEGORY = "all"


@dataclass(frozen=True)
class Prompt:
    index: int
    category: str
    messages: tuple[Mapping[str, str], ...]


def load_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise SpecwireError.field(
            "--prompts", str(path), f"a readable UTF-8 file ({reason})"
        ) from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompts.append(parse_line(line, number, len(prompts)))
    if not prompts:
        raise SpecwireError.field("--prompts", str(path), "at least one prompt line")
    return prompts[:limit]


def parse_line(line: str, number: int, index: int) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise _bad(number, "JSON", f"column {error.colno}", "one JSON object a line") from error
    if not isinstance(entry, dict):
        raise _bad(number, "JSON", type(entry).__name__, "one JSON object a line")
    category = entry.get("category", DEFAULT_CATEGORY)
    if not isinstance(category, str) or not category:
        raise _bad(number, "category", category, "a non-empty string")
    return Prompt(index, category, _messages(entry, number))


def _messages(entry: dict[str, Any], number: int) -> tuple[Mapping[str, str], ...]:
    if ("prompt" in entry) == ("messages" in entry):
        given = "both" if "prompt" in entry else "neither"
        raise _bad(number, "prompt", given, "either `prompt` or `messages`")
    if "prompt" in entry:
        text = entry["prompt"]
        if not isinstance(text, str) or not text:
            raise _bad(number, "prompt", text, "a non-empty string")
        return ({"role": "user", "content": text},)
    messages = entry["messages"]
    if not isinstance(messages, list) or not messages:
        raise _bad(number, "messages", messages, "a non-empty list")
    return tuple(_message(item, number, at) for at, item in enumerate(messages))


def _message(item: Any, number: int, at: int) -> Mapping[str, str]:
    where = f"messages[{at}]"
    if not isinstance(item, dict):
        raise _bad(number, where, item, "an object with `role` and `content`")
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise _bad(number, f"{where}.role", role, ", ".join(ROLES))
    if not isinstance(content, str):
        raise _bad(number, f"{where}.content", content, "a string")
    return {"role": role, "content": content}


def _bad(number: int, field: str, value: Any, accepted: str) -> SpecwireError:
    shown = value if isinstance(value, str) else json.dumps(value)
    return SpecwireError.field(f"line {number}: {field}", shown[:80], accepted)
