"""Text of the target: tokenizer, chat template and the seam where the user's turn begins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from engine.errors import CheckpointError
from engine.tokenizer import read_document, tokenizer_hash

_MARK = "\u241fuser turn\u241f"


class Chat:
    """What turns messages into ids. `open_user` is the text before the user's words, `close_user`
    the text after them up to where the assistant speaks."""

    def __init__(self, document: bytes) -> None:
        fields = json.loads(document)
        self.hash = tokenizer_hash(document)
        try:
            self.tokenizer = Tokenizer.from_str(json.dumps(fields["tokenizer"]))
        except Exception as error:  # tokenizers raises nothing more special
            raise CheckpointError(f"the target's tokenizer cannot be used: {error}") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        special = fields.get("special") or {}
        self._special = special
        self.eos_ids: tuple[int, ...] = tuple(special.get("eos_token_ids") or ())
        source = fields.get("chat_template") or ""
        if not source:
            raise CheckpointError("the target has no chat template; give prompts with token ids")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(source)
        whole = self.render([{"role": "user", "content": _MARK}])
        self.open_user, self.close_user = whole.split(_MARK)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        return str(
            self._template.render(
                messages=list(messages), add_generation_prompt=True, **self._special
            )
        )

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode(self.render(messages))

    def user(self, text: str) -> list[int]:
        """Ids of a conversation with one user turn."""
        return self.encode(self.open_user + text + self.close_user)


def load_chat(directory: Path) -> Chat:
    return Chat(read_document(directory))


def read_prompts(path: Path) -> list[dict[str, object]]:
    """A jsonl file with `prompt` or `messages` (and `category`) a line. Raises CheckpointError."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        row = json.loads(line)
        if not isinstance(row, dict) or not ({"prompt", "messages", "ids"} & set(row)):
            raise CheckpointError(f"prompt file line {number} has no prompt, messages or ids")
        rows.append(row)
    return rows


def prompt_ids(chat: Chat | None, row: Mapping[str, object], template: bool = True) -> list[int]:
    """Ids of one row of a prompt file; `ids` are taken as they are. Without `template` the text is
    what the target would see from somebody who forgot it."""
    ids = row.get("ids")
    if isinstance(ids, list):
        return [int(i) for i in ids]
    if chat is None:
        raise CheckpointError("a prompt of text needs a chat template; this target has none")
    messages = row.get("messages")
    if isinstance(messages, list):
        if template:
            return chat.prompt(messages)
        return chat.encode("\n".join(str(message["content"]) for message in messages))
    return chat.user(str(row["prompt"])) if template else chat.encode(str(row["prompt"]))
