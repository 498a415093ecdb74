"""Text at the edge: chat template, incremental detokenisation, stop strings.

Workers see token ids only. A delta never ends inside a UTF-8 character, and the deltas of one
answer join to exactly what decoding all its tokens at once gives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from specwire.errors import SpecwireError

REPLACEMENT = "\ufffd"
ROLES = ("system", "user", "assistant")
# Tokens that decode to nothing (skipped specials) would let the window grow for ever.
_WINDOW_TOKENS = 64


class TextModel:
    """Tokenizer and chat template of one target, from the document that the target serves."""

    def __init__(self, document: bytes) -> None:
        fields = json.loads(document)
        self._tokenizer = Tokenizer.from_str(json.dumps(fields["tokenizer"]))
        # Truncation and padding belong to batch training, never to a prompt.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special = {
            name: _content(value) for name, value in (fields.get("special") or {}).items()
        }
        self._token_texts: dict[int, str] = {}
        source = fields.get("chat_template") or ""
        self._template = _environment().from_string(source) if source else None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # A batch, because that lets other threads run meanwhile; `encode` does not.
        batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = batch[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens have no text."""
        text: str = self._tokenizer.decode(ids)
        return text

    def token_text(self, token: int) -> str:
        """Text of one token alone, special ones too; an unfinished character is U+FFFD."""
        text = self._token_texts.get(token)
        if text is None:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            self._token_texts[token] = text
        return text

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """One prompt from chat messages, ending where the assistant speaks."""
        if self._template is None:
            raise SpecwireError.field(
                "chat", "messages", "a prompt or token ids: this model has no chat template"
            )
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, **self._special
            )
        except TemplateError as error:
            accepted = f"messages that the model's chat template takes ({type(error).__name__})"
            raise SpecwireError.field(
                "chat.messages", f"{len(messages)} messages", accepted
            ) from error


def _content(value: Any) -> Any:
    return value["content"] if isinstance(value, dict) and "content" in value else value


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.filters["tojson"] = tojson
    return environment


class Detokenizer:
    """Turns tokens into text piece by piece; an unfinished character is held back."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._ids: list[int] = []
        # Window [_prefix, end): decoded with the tokens of the previous piece as context, because
        # some decoders treat the first token of a text differently. [_prefix, _read) is out.
        self._prefix = 0
        self._read = 0
        self._shown = ""

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._model.decode(self._ids[self._prefix :])
        if text.endswith(REPLACEMENT):
            return ""
        return self._take(text)

    def extend(self, tokens: Sequence[int]) -> str:
        """The same text as a `push` of each token, decoded at once where no character is cut."""
        self._ids += tokens
        text = self._model.decode(self._ids[self._prefix :])
        if not text.endswith(REPLACEMENT):
            return self._take(text)
        del self._ids[len(self._ids) - len(tokens) :]
        return "".join(map(self.push, tokens))

    def extend_both(self, first: Sequence[int], second: Sequence[int]) -> tuple[str, str]:
        """The text of each, as two calls of `extend` have it."""
        if not first or not second:
            return self.extend(first) if first else "", self.extend(second) if second else ""
        before = [*self._ids[self._prefix :], *first]
        text, whole = self._model.decode(before), self._model.decode([*before, *second])
        if REPLACEMENT in (text[-1:], whole[-1:]) or not whole.startswith(text):
            return self.extend(first), self.extend(second)
        self._ids += first
        self._ids += second
        shown = len(self._shown)
        self._take(whole)
        return text[shown:], whole[len(text) :]

    def flush(self) -> str:
        """What is left at the end, unfinished characters included."""
        return self._take(self._model.decode(self._ids[self._prefix :]))

    def _take(self, text: str) -> str:
        piece = text[len(self._shown) :]
        if piece or len(self._ids) - self._prefix > _WINDOW_TOKENS:
            self._prefix = self._read
            self._shown = self._model.decode(self._ids[self._prefix :])
        self._read = len(self._ids)
        return piece


class StopFilter:
    """Passes text through up to the first stop string, whatever the borders of the pieces.

    The string that is *complete* first ends the text; of several complete at one character, the
    longest. Text that may be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: the stop string stays in the text."""
        self._stops = sorted(stops, key=len, reverse=True)
        self._include = include
        self._held = ""
        self.matched = ""

    def push(self, piece: str, search: bool = True) -> str:
        """`search` False: no stop string may be complete within this piece."""
        if not self._stops:
            return piece
        text = self._held + piece
        match = self._first_complete(text) if search else None
        if match is not None:
            start, self.matched = match
            self._held = ""
            return text[: start + len(self.matched) if self._include else start]
        keep = self._possible_prefix(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text

    def _first_complete(self, text: str) -> tuple[int, str] | None:
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _possible_prefix(self, text: str) -> int:
        longest = min(len(text), len(self._stops[0]) - 1)
        for size in range(longest, 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one round. `tokens` counts those of the answer: fewer than pushed after a stop."""

    text: str
    accepted_chars: int
    tokens: int
    stop: str


class TextStream:
    """Text of one answer, round by round."""

    def __init__(
        self,
        model: TextModel,
        stops: Sequence[str],
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        """No stop string ends the answer within its first `min_tokens` tokens."""
        self._detokenizer = Detokenizer(model)
        self._stop, self._stops = StopFilter(stops, include_stop), bool(stops)
        self._min_tokens, self._count = min_tokens, 0

    def push(self, tokens: Sequence[int], accepted: int, last: bool, silent: int = 0) -> Piece:
        """`last`: the answer ends with these tokens; nothing stays held back. The last `silent`
        tokens have no text."""
        text = ""
        accepted_chars = 0
        if not self._stops:
            spoken = tokens[: len(tokens) - silent]
            right, own = self._detokenizer.extend_both(spoken[:accepted], spoken[accepted:])
            accepted_chars, text = len(right), right + own
            text += self._detokenizer.flush() if last else ""
            return Piece(text, accepted_chars, len(tokens), "")
        for count, token in enumerate(tokens, start=1):
            self._count += 1
            if count <= len(tokens) - silent:
                text += self._stop.push(self._detokenizer.push(token), self._searched)
            if count <= accepted:
                accepted_chars = len(text)
            if self._stop.matched:
                return Piece(text, accepted_chars, count, self._stop.matched)
        if last:
            text += self._stop.push(self._detokenizer.flush(), self._searched)
            if not self._stop.matched:
                text += self._stop.flush()
        return Piece(text, accepted_chars, len(tokens), self._stop.matched)

    @property
    def _searched(self) -> bool:
        return self._count > self._min_tokens
