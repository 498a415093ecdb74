"""`generate`: training documents whose every answer token the target chose itself."""

from __future__ import annotations

import hashlib
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from draft_svc.training.chat import Chat, prompt_ids, read_prompts
from draft_svc.training.decoder import BatchDecoder, Finished, Job
from draft_svc.training.net import TargetNet
from draft_svc.training.prompts import KINDS, Opening, around, opening
from draft_svc.training.shards import Document, Manifest, ShardWriter, distinct_ratio
from engine.weights import shard_names

LOOP_RATIO = 0.5
_USER_TEMPERATURES = (0.7, 0.9, 1.0)
_SHORTEST = 4


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """`answer_tokens` or `minutes` ends the run, whichever comes first."""

    minutes: float
    answer_tokens: int
    slots: int
    max_length: int
    max_new: int
    greedy_share: float = 0.7
    temperature: float = 0.8
    passage_share: float = 0.15
    seed: int = 0
    stride: int = 16
    own_prompts: bool = True
    graph: bool = True


@dataclass(frozen=True, slots=True)
class _Turn:
    """Tag of a job that writes a user turn: its text goes on after `text`."""

    opening: Opening


@dataclass(frozen=True, slots=True)
class _Answer:
    kind: str


def weights_sha256(directory: Path) -> str:
    """Hash over the weight files of a checkpoint."""
    digest = hashlib.sha256()
    for name in shard_names(directory):
        with (directory / name).open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()


class Generator:
    """Makes jobs, turns finished ones into documents and follow-up jobs."""

    def __init__(
        self,
        net: TargetNet,
        chat: Chat | None,
        writer: ShardWriter,
        options: GenerateOptions,
        prompt_file: Path | None = None,
    ) -> None:
        self.net, self.chat, self.writer, self.options = net, chat, writer, options
        # A resumed run must not repeat what is on disk.
        self._rng = random.Random(f"{options.seed}/{len(writer.manifest.shards)}")
        self._pending: deque[Job] = deque()
        self.answer_tokens = 0
        if prompt_file is not None:
            used = writer.manifest.counts.get("file_prompts", 0)
            for row in read_prompts(prompt_file)[used:]:
                self._ask(prompt_ids(chat, row), "file")
                writer.count("file_prompts")

    def source(self, count: int) -> list[Job]:
        """Up to `count` jobs: waiting answers first, then new user turns."""
        jobs: list[Job] = []
        while len(jobs) < count:
            if self._pending:
                jobs.append(self._pending.popleft())
            elif not self.options.own_prompts:
                break
            else:
                self._begin(opening(self._rng))
        return jobs

    def _begin(self, begun: Opening) -> None:
        assert self.chat is not None
        if begun.complete:
            self._ask(self.chat.user(begun.text), begun.kind)
            return
        prompt = self.chat.encode(self.chat.open_user + begun.text)
        if len(prompt) + begun.max_tokens > self.options.max_length:
            return
        temperature = self._rng.choice(_USER_TEMPERATURES)
        self._add(prompt, begun.max_tokens, temperature, _Turn(begun))

    def _ask(self, prompt: Sequence[int], kind: str) -> None:
        o = self.options
        room = min(o.max_new, o.max_length - len(prompt))
        if room < min(64, o.max_new):
            self.writer.count("dropped_too_long")
            return
        greedy = self._rng.random() < o.greedy_share
        self._add(prompt, room, 0.0 if greedy else o.temperature, _Answer(kind))

    def _add(
        self, prompt: Sequence[int], max_new: int, temperature: float, tag: _Turn | _Answer
    ) -> None:
        seed = self._rng.getrandbits(31)
        self._pending.append(Job(prompt, max_new, temperature, seed, tag))

    def take(self, done: Finished) -> None:
        """Files one finished job."""
        if isinstance(done.job.tag, _Turn):
            self._take_turn(done, done.job.tag.opening)
        else:
            self._take_answer(done, done.job.tag.kind)

    def _take_turn(self, done: Finished, begun: Opening) -> None:
        assert self.chat is not None
        written = done.ids[:-1] if done.stopped else done.ids
        usable = done.stopped or (begun.cut_ok and not done.looped)
        if not usable or distinct_ratio(written) < LOOP_RATIO:
            self.writer.count("dropped_turns")
            return
        text = begun.text + self.chat.decode(written)
        self._ask(self.chat.user(text), begun.kind)

    def _take_answer(self, done: Finished, kind: str) -> None:
        if done.looped or distinct_ratio(done.ids) < LOOP_RATIO:
            self.writer.count("dropped_loops")
            return
        if len(done.ids) < _SHORTEST:
            self.writer.count("dropped_short")
            return
        prompt, temperature = done.job.prompt, done.job.temperature
        self.writer.add(Document(prompt, done.ids, temperature, KINDS.index(kind)))
        self.answer_tokens += len(done.ids)
        o, plain = self.options, kind not in ("passage", "ask", "file")
        if plain and len(done.ids) >= 96 and self._rng.random() < self._passage_share(kind):
            assert self.chat is not None
            longest = o.max_length - o.max_new // 2
            passage = self.chat.decode(done.ids[: max(96, min(len(done.ids), longest - 64))])
            self._begin(around(self._rng, passage.strip()))

    def _passage_share(self, kind: str) -> float:
        return self.options.passage_share * (4 if kind == "write" else 1)


def generate(
    net: TargetNet,
    chat: Chat | None,
    directory: Path,
    manifest: Manifest,
    options: GenerateOptions,
    prompt_file: Path | None = None,
    say: Callable[[str], None] = print,
) -> Manifest:
    """Runs until time, tokens or prompts end; writes a shard every half minute."""
    started = time.monotonic()
    writer = ShardWriter(directory, manifest, net.config.vocab_size)
    maker = Generator(net, chat, writer, options, prompt_file)
    decoder = BatchDecoder(
        net,
        slots=options.slots,
        max_length=options.max_length,
        stop_ids=net.config.eos_token_ids or (chat.eos_ids if chat else ()),
        stride=options.stride,
        graph=options.graph,
    )
    deadline = started + options.minutes * 60

    def stop() -> bool:
        enough = maker.answer_tokens >= options.answer_tokens
        return enough or time.monotonic() >= deadline

    flushed = told = time.monotonic()
    for finished in decoder.run(maker.source, stop):
        for done in finished:
            maker.take(done)
        now = time.monotonic()
        if now - flushed > 30:
            writer.flush()
            flushed = now
        if now - told > 10:
            say(_progress(decoder, maker, writer, now - started))
            told = now
    writer.flush()
    say(_progress(decoder, maker, writer, time.monotonic() - started))
    return manifest


def _progress(decoder: BatchDecoder, maker: Generator, writer: ShardWriter, elapsed: float) -> str:
    counts = writer.manifest.counts
    dropped = {k.removeprefix("dropped_"): v for k, v in counts.items() if k.startswith("dropped")}
    return (
        f"{elapsed:6.0f} s  {decoder.made_tokens / 1e6:.2f} M tokens decoded "
        f"({decoder.made_tokens / max(elapsed, 1e-9):,.0f}/s), "
        f"{maker.answer_tokens / 1e6:.2f} M answer tokens kept, dropped {dropped}"
    )
