"""Detokenisation, stop strings and chat templates, against decoding everything at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from coordinator.text import Detokenizer, StopFilter, TextModel, TextStream
from specwire.errors import SpecwireError

SPECIAL = 256


def _byte_level(template: str = "") -> TextModel:
    """Token i < 256 is the byte i; token 256 is a special one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # GPT-2's table: printable bytes stand for themselves, the others for letters from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    letter_of = {b: chr(b) for b in printable}
    letter_of.update({b: chr(256 + i) for i, b in enumerate(others)})
    assert sorted(letter_of.values()) == letters
    vocab = {letter_of[b]: b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    special = {"bos_token": "<s>", "eos_token": {"content": "<end>"}}
    return TextModel(document_of(tokenizer, template, special))


def document_of(
    tokenizer: Tokenizer, template: str = "", special: dict[str, Any] | None = None
) -> bytes:
    fields = {"tokenizer": json.loads(tokenizer.to_str()), "chat_template": template}
    return json.dumps({**fields, "special": special or {}}).encode()


def _metaspace() -> TextModel:
    """A decoder that treats the first token of a text in a special way."""
    words = ["\u2581né", "\u2581", "\u2581🙂", "x", "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return TextModel(document_of(tokenizer, "", {}))


BYTES = _byte_level()
WORDS = _metaspace()


def _pieces(model: TextModel, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(model)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def test_encoding_gives_the_bytes() -> None:
    assert BYTES.encode("né🙂", add_special_tokens=False) == list("né🙂".encode())


def test_characters_cut_anywhere_come_out_whole() -> None:
    """WC-34: every place where a round may end."""
    ids = list("né🙂!".encode())
    for cuts in range(2 ** (len(ids) - 1)):
        stream = TextStream(BYTES, ())
        rounds: list[list[int]] = [[]]
        for index, token in enumerate(ids):
            rounds[-1].append(token)
            if cuts >> index & 1:
                rounds.append([])
        texts = [stream.push(tokens, 0, last=tokens is rounds[-1]).text for tokens in rounds]
        assert "".join(texts) == "né🙂!"
        assert not any("\ufffd" in text for text in texts)


@given(st.text(max_size=40), st.data())
def test_text_joins_to_the_whole(text: str, data: st.DataObject) -> None:
    ids = list(text.encode())
    for _ in range(data.draw(st.integers(0, 4))):
        ids.insert(data.draw(st.integers(0, len(ids))), SPECIAL)
    pieces = _pieces(BYTES, ids)
    assert "".join(pieces) == BYTES.decode(ids) == text


@given(st.lists(st.integers(0, 256), max_size=60))
def test_any_bytes_join_to_the_whole(ids: list[int]) -> None:
    assert "".join(_pieces(BYTES, ids)) == BYTES.decode(ids)


@given(st.lists(st.integers(0, 3), max_size=30))
def test_decoders_that_strip_the_first_space(ids: list[int]) -> None:
    assert "".join(_pieces(WORDS, ids)) == WORDS.decode(ids)


def test_many_special_tokens_stay_cheap_and_silent() -> None:
    ids = [65, *[SPECIAL] * 2000, 66]
    assert "".join(_pieces(BYTES, ids)) == "AB"


def _reference(text: str, stops: list[str]) -> tuple[str, str]:
    """Character by character: the first stop that is complete, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, ""


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(1, 5), min_size=1, max_size=30),
)
def test_stop_strings_do_not_depend_on_the_pieces(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    stop_filter = StopFilter(stops)
    out, rest, turn = "", text, 0
    while rest and not stop_filter.matched:
        size = sizes[turn % len(sizes)]
        out += stop_filter.push(rest[:size])
        rest, turn = rest[size:], turn + 1
    if not stop_filter.matched:
        out += stop_filter.flush()
    assert (out, stop_filter.matched) == _reference(text, stops)


def test_text_before_a_possible_stop_is_not_held() -> None:
    stop_filter = StopFilter(["END"])
    assert stop_filter.push("one E") == "one "
    assert stop_filter.push("N") == ""
    assert stop_filter.push("O") == "ENO"
    assert not stop_filter.matched


def test_a_stop_inside_an_accepted_block_counts_its_tokens() -> None:
    stream = TextStream(BYTES, ("STOP",))
    piece = stream.push(list(b"abSTOPcd"), accepted=7, last=False)
    assert (piece.text, piece.tokens, piece.stop) == ("ab", 6, "STOP")
    assert piece.accepted_chars == 2


def test_accepted_characters_are_a_prefix() -> None:
    stream = TextStream(BYTES, ())
    piece = stream.push(list("né!".encode()), accepted=2, last=False)
    # The accepted bytes end inside the second character.
    assert (piece.text, piece.accepted_chars) == ("né!", 1)


def test_the_end_flushes_what_is_held() -> None:
    stream = TextStream(BYTES, ("xyz",))
    assert stream.push(list(b"ax"), 0, last=False).text == "a"
    assert stream.push([0xC3], 0, last=True).text == "x\ufffd"


def test_chat_templates_see_messages_and_special_tokens() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    model = _byte_level(template)
    text = model.render_chat([{"role": "user", "content": "hi"}])
    assert text == "<s>[user]hi<end>[assistant]"


@pytest.mark.parametrize(
    "template",
    ["", "{{ raise_exception('roles must alternate') }}", "{{ ''.__class__.__mro__[1] }}"],
)
def test_templates_that_refuse_are_typed_errors(template: str) -> None:
    with pytest.raises(SpecwireError) as caught:
        _byte_level(template).render_chat([{"role": "user", "content": "secret"}])
    assert caught.value.metadata["field"].startswith("chat")
    assert "secret" not in caught.value.message


@given(
    st.lists(
        st.lists(st.sampled_from([65, 66, 195, 169, 240, 159, 153, 130, 255]), max_size=8),
        max_size=8,
    )
)
def test_blocks_at_once_and_token_by_token_give_the_same_text(blocks: list[list[int]]) -> None:
    """WC-34: every block's text is what its tokens give one by one, cut characters included."""
    whole, single = Detokenizer(BYTES), Detokenizer(BYTES)
    for block in blocks:
        assert whole.extend(block) == "".join(map(single.push, block))
    assert whole.flush() == single.flush()
