"""Deltas and the final message of one choice; text with minimum lengths and silent tokens."""

from __future__ import annotations

from coordinator.answer import Answer, AnswerSpec
from coordinator.text import StopFilter, TextModel, TextStream
from specwire.v1 import common_pb2, generate_pb2, target_pb2
from tests.service.coordinator_harness import document

MODEL = TextModel(document())
RECORD = generate_pb2.AcceptanceRecord()


def verdict(step: int, tokens: list[int], **fields: object) -> target_pb2.Verdict:
    scored = [common_pb2.TokenLogprobs(token_id=token) for token in tokens]
    return target_pb2.Verdict(step_id=step, tokens=tokens, logprobs=scored, **fields)  # type: ignore[arg-type]


def spec(**fields: object) -> AnswerSpec:
    return AnswerSpec(common_pb2.Sampling(), 10, **fields)  # type: ignore[arg-type]


def told(answer: Answer, brought: target_pb2.Verdict, done: bool = False) -> generate_pb2.Delta:
    answer.add(brought, done)
    delta = answer.take()
    assert delta is not None
    return delta


def test_cached_tokens_are_those_of_the_first_step() -> None:
    answer = Answer(spec(), MODEL)
    answer.add(verdict(0, [1], cached_tokens=5), False)
    answer.add(verdict(1, [2, 3], accepted=1), False)
    # Opened again at another target, which had more of it.
    last = verdict(0, [4], cached_tokens=8, finish=common_pb2.FINISH_REASON_LENGTH)
    answer.add(last, True)
    done = answer.finished(last, 6, RECORD)
    assert done.usage.cached_prompt_tokens == 5
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (6, 4)
    assert done.reason == common_pb2.FINISH_REASON_LENGTH and not done.HasField("stop_token_id")


def test_what_lies_behind_a_stop_string_is_cut_with_its_log_probabilities() -> None:
    answer = Answer(spec(stops=("w2 w3",)), MODEL)
    delta = told(answer, verdict(0, [1, 2, 3, 4, 5], accepted=4))
    assert (delta.text, list(delta.token_ids)) == ("w1 ", [1, 2, 3])
    assert [s.token_id for s in delta.logprobs] == [1, 2, 3]
    assert [s.text for s in delta.logprobs] == ["w1 ", "w2 ", "w3 "]
    assert delta.accepted_count == 3 and (answer.stop, answer.tokens) == ("w2 w3", 3)


def test_a_delta_takes_in_no_more_than_fits_a_message() -> None:
    answer = Answer(spec(logprobs=20), MODEL)
    for step in range(64):
        assert not answer.full
        answer.add(verdict(step, [1, 2, 3, 4], accepted=3), False)
    assert answer.full
    delta = answer.take()
    assert delta is not None and len(delta.token_ids) == 256 == len(delta.logprobs)
    assert not answer.full and answer.take() is None


def test_rounds_of_one_delta_say_what_the_draft_proposed_in_each() -> None:
    answer = Answer(spec(), MODEL)
    for step, accepted in enumerate((0, 0, 2, 1)):
        answer.add(verdict(step, [1, 2, 3], accepted=accepted), False)
    delta = answer.take()
    assert delta is not None and delta.text == "w1 w2 w3 " * 4
    assert (delta.accepted_count, delta.accepted_chars) == (0, 0)
    spans = [(s.start, s.count, s.start_char, s.chars) for s in delta.later_accepted]
    assert spans == [(6, 2, 18, 6), (9, 1, 27, 3)]


def test_what_nobody_asked_for_makes_no_delta() -> None:
    answer = Answer(spec(stops=("w1 w2 ",), return_ids=False), MODEL)
    answer.add(target_pb2.Verdict(tokens=[1]), False)
    assert answer.take() is None and answer.tokens == 1
    answer.add(target_pb2.Verdict(tokens=[1]), True)
    found = answer.take()
    assert found is not None and found.text == "w1 w1 "


def test_text_that_is_held_back_holds_no_token_back() -> None:
    answer = Answer(spec(stops=("w2 w4",)), MODEL)
    first = told(answer, verdict(0, [1, 2]))
    assert first.text == "w1 " and len(first.token_ids) == len(first.logprobs) == 2
    assert told(answer, verdict(1, [3]), True).text == "w2 w3 "


def test_no_stop_string_is_complete_before_the_minimum() -> None:
    stream = TextStream(MODEL, ("w2 ",), min_tokens=3)
    assert stream.push([1, 2, 2], 0, last=False).text == "w1 w2 w2 "
    piece = stream.push([4, 2, 5], 0, last=False)
    assert (piece.text, piece.tokens, piece.stop) == ("w4 ", 2, "w2 ")


def test_a_stop_string_may_begin_before_the_minimum_and_end_behind_it() -> None:
    stop_filter = StopFilter(["abc"])
    assert stop_filter.push("xab", search=False) == "x"
    assert stop_filter.push("c") == "" and stop_filter.matched == "abc"
    included = StopFilter(["abc"], include=True)
    assert included.push("xabcy") == "xabc" and included.matched == "abc"


def test_a_silent_token_counts_but_has_no_text() -> None:
    stream = TextStream(MODEL, ("w9 ",))
    piece = stream.push([1, 9], 2, last=True, silent=1)
    assert (piece.text, piece.tokens, piece.stop) == ("w1 ", 2, "")
