"""Documents on disk, the hold-out, loops, anchors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from draft_svc.training.batches import Batches, anchor_counts
from draft_svc.training.decoder import BatchDecoder, Job
from draft_svc.training.generate import GenerateOptions, generate
from draft_svc.training.shards import (
    Document,
    Manifest,
    ShardWriter,
    distinct_ratio,
    held_out,
    load_corpus,
    read_manifest,
)
from engine.errors import CheckpointError
from tests.training.toys import BATCHES, corpus_of, random_documents, tiny_target


def manifest(**changes: object) -> Manifest:
    values = {"target_sha256": "a", "tokenizer_hash": "b", "holdout": 0.3, "seed": 0} | changes
    return Manifest(**values)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 1000, 6).tolist() for _ in range(count)]


def test_held_out_prompts_are_never_trained_on(tmp_path: Path) -> None:
    """A prompt is on one side for ever, whatever the answer, the run and the shard."""
    found = prompts(200)
    for part in (found[:120], found[60:]):  # a second run, with prompts that came before
        writer = ShardWriter(tmp_path, manifest(), 70000)
        for prompt in part:
            writer.add(Document(prompt, [5, 6, 7], 0.8))
        writer.flush()
    train, held = load_corpus([tmp_path]), load_corpus([tmp_path], "holdout")
    trained = {tuple(train.prompt(i)) for i in range(len(train))}
    kept = {tuple(held.prompt(i)) for i in range(len(held))}
    assert not trained & kept and len(trained | kept) == 200
    assert 30 < len(kept) < 90
    assert all(held_out(list(prompt), 0.3) for prompt in kept)


def test_a_training_shard_with_a_held_out_prompt_is_cleaned(tmp_path: Path) -> None:
    """Data made with a smaller hold-out, joined with others, lose what the larger one keeps."""
    for name, share in (("small", 0.0), ("large", 0.4)):
        writer = ShardWriter(tmp_path / name, manifest(holdout=share), 1000)
        for prompt in prompts(80):
            writer.add(Document(prompt, [5, 6], 0.0))
        writer.flush()
    joined = load_corpus([tmp_path / "small", tmp_path / "large"])
    assert len(load_corpus([tmp_path / "small"])) == 80
    assert not any(held_out(joined.prompt(i), 0.4) for i in range(len(joined)))
    assert len(joined) == 2 * len(load_corpus([tmp_path / "large"]))


def test_shards_are_added_to_and_belong_to_one_target(tmp_path: Path) -> None:
    documents = [Document([1, 2, 3], list(range(n)), 0.5, n) for n in range(4, 9)]
    for part in (documents[:2], documents[2:]):
        writer = ShardWriter(tmp_path, manifest(holdout=0.0), 65536)
        for document in part:
            writer.add(document)
        writer.flush()
    corpus = load_corpus([tmp_path])
    assert corpus.ids.dtype == np.uint16
    assert [corpus.document(i).tolist() for i in range(5)] == [
        [1, 2, 3, *d.answer] for d in documents
    ]
    assert corpus.kinds.tolist() == [4, 5, 6, 7, 8]
    counts = read_manifest(tmp_path)
    assert counts is not None and counts.counts["train_answer_tokens"] == 30
    with pytest.raises(CheckpointError, match="target_sha256"):
        ShardWriter(tmp_path, manifest(holdout=0.0, target_sha256="other"), 65536)


def test_distinct_ratio() -> None:
    assert distinct_ratio([1, 2, 3, 4, 5, 6]) == 1.0
    assert distinct_ratio([1, 2] * 20) == 2 / 37
    assert distinct_ratio([1, 2]) == 1.0


@pytest.mark.parametrize("spread", [0.2, 0.01])
def test_generator_drops_loops_and_goes_on(tmp_path: Path, spread: float) -> None:
    """Answers that repeat are cut and dropped, others kept whole; a second run with a longer
    prompt file runs only what is new. With small weights the target says one token for ever.
    """
    net = tiny_target(tmp_path / "target", initializer_range=spread)
    file = tmp_path / "prompts.jsonl"
    rows = np.random.default_rng(0).integers(10, 90, (9, 4)).tolist()
    options = GenerateOptions(1.0, 10**9, 4, 200, 150, greedy_share=1.0, own_prompts=False)
    lines: list[str] = []
    for count in (5, 9):
        file.write_text("\n".join(json.dumps({"ids": row}) for row in rows[:count]))
        data = tmp_path / "data"
        made = generate(net, None, data, manifest(holdout=0.0), options, file, lines.append)
    assert made.counts["file_prompts"] == 9
    if spread < 0.1:
        assert made.counts["dropped_loops"] == 9 and not made.shards
        return
    corpus = load_corpus([data])
    assert {tuple(corpus.prompt(i)) for i in range(len(corpus))} == {tuple(row) for row in rows}
    assert len(corpus) == 9 and len(made.shards) == 2
    for i in range(9):
        answer = corpus.document(i)[4:].tolist()
        assert distinct_ratio(answer) >= 0.5
        assert len(answer) == 150 or answer[-1] == 2  # the stop id stays


def test_a_loop_is_cut_early(tmp_path: Path) -> None:
    """A slot whose text repeats makes room before its limit."""
    net = tiny_target(tmp_path, initializer_range=0.01)
    decoder = BatchDecoder(net, slots=2, max_length=520, stop_ids=(), stride=8)
    jobs = [Job([5, 6, 7], 500)]
    finished = [d for batch in decoder.run(lambda n: [jobs.pop()] if jobs else []) for d in batch]
    assert len(finished) == 1 and finished[0].looped and not finished[0].stopped
    ids = finished[0].ids

    def repeats(end: int) -> bool:
        last = ids[end - 64 : end]
        return any(last == ids[end - 64 - p : end - p] for p in range(1, 33))

    earliest = next(end for end in range(96, len(ids) + 1) if repeats(end))
    assert len(ids) < 500 and len(ids) - earliest < 8 and repeats(len(ids))


def test_anchors_belong_to_documents() -> None:
    """DF-22: every document has anchors in proportion to its own answer, whatever shares its
    batch; all lie in the answer, differ, and have a token after them."""
    documents = random_documents(40) + [list(range(10, 90))] * 2
    corpus = corpus_of(documents)
    stream = Batches(corpus, BATCHES, 3).stream()
    lengths = corpus.lengths
    wanted = anchor_counts(corpus.prompts.astype(np.int64), lengths, BATCHES)
    seen: dict[tuple[int, ...], set[int]] = {}
    epochs = 0
    while epochs < 6:
        batch, place = next(stream)
        epochs = place[0]
        rows = (batch.blocks // batch.anchors.shape[1]).tolist()
        picked = batch.anchors.flatten()[batch.blocks].tolist()
        for row in range(len(batch.lengths)):
            length = int(batch.lengths[row])
            text = tuple(batch.ids[row, :length].tolist())
            own = [a for r, a in zip(rows, picked, strict=True) if r == row]
            number = documents.index(list(text))
            assert len(own) == wanted[number] == len(set(own)) == np.ceil((length - 3) * 0.5)
            assert min(own) >= 3 and max(own) <= length - 2
            assert batch.anchors[row].diff().min() >= 0
            seen.setdefault(text, set()).update(own)
        groups = batch.anchors.view(len(batch.lengths), len(batch.reach), -1)
        assert all(int(groups[:, g].max()) <= r for g, r in enumerate(batch.reach))
    covered = np.mean([len(s) / (len(t) - 4) for t, s in seen.items()])
    assert covered > 0.9  # six visits at density one half


def test_batches_are_those_of_the_place() -> None:
    """Starting at a place gives what an uninterrupted stream gives there."""
    batches = Batches(corpus_of(random_documents(30)), BATCHES, 1)
    whole = batches.stream()
    first = [next(whole) for _ in range(9)]
    again = batches.stream(first[4][1])
    for batch, place in first[5:]:
        other, after = next(again)
        assert after == place and other.reach == batch.reach
        assert other.ids.equal(batch.ids) and other.anchors.equal(batch.anchors)
