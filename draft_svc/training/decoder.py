"""Batched generation with the target: a fixed number of slots, refilled as answers end.

On a GPU one decode step is one CUDA graph; the host looks at the slots every `stride` steps only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draft_svc.training.net import StaticCache, TargetNet

_PREFILL_TOKENS = 32768
# A text whose last _REPEATED tokens have a period of at most _PERIOD is given up.
_REPEATED, _PERIOD = 64, 32


@dataclass(slots=True)
class Job:
    """One text to generate. `temperature` 0 is greedy; the draw at position p is keyed by
    (seed, p)."""

    prompt: Sequence[int]
    max_new: int
    temperature: float = 0.0
    seed: int = 0
    tag: Any = None


@dataclass(slots=True)
class Finished:
    """`stopped`: it ended with a stop id (included in `ids`), not at a limit or the deadline.
    `looped`: it was cut because its end repeats with a short period."""

    job: Job
    ids: list[int]
    stopped: bool
    looped: bool = False


@dataclass(slots=True)
class _State:
    """Device tensors [slots]: the token to run next, its position, what was made."""

    ids: Tensor
    positions: Tensor
    active: Tensor
    made: Tensor
    limits: Tensor
    temperature: Tensor
    seeds: Tensor
    out: Tensor = field(repr=False)


class BatchDecoder:
    """`max_length` bounds prompt + answer of every job; `graph` matters on a GPU only."""

    def __init__(
        self,
        net: TargetNet,
        *,
        slots: int,
        max_length: int,
        stop_ids: Sequence[int],
        stride: int = 16,
        graph: bool = True,
    ) -> None:
        self.net, self.slots, self.max_length, self.stride = net, slots, max_length, stride
        device = net.device
        self._cache = StaticCache(net, slots, max_length)
        self._stops = torch.tensor(list(stop_ids) or [-1], device=device)

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(slots, *shape, dtype=dtype, device=device)

        i64 = torch.int64
        self._s = _State(
            ids=zeros(i64),
            positions=zeros(i64),
            active=zeros(torch.bool),
            made=zeros(i64),
            limits=zeros(i64),
            temperature=zeros(torch.float32),
            seeds=zeros(i64),
            out=zeros(i64, max_length + 1),
        )
        self._jobs: list[Job | None] = [None] * slots
        self._use_graph = graph
        self._graph: torch.cuda.CUDAGraph | None = None
        self.made_tokens = 0

    @torch.inference_mode()
    def run(
        self, source: Callable[[int], list[Job]], stop: Callable[[], bool] = lambda: False
    ) -> Iterator[list[Finished]]:
        """Asks `source(n)` for up to n jobs whenever slots are free, until it gives none and all
        are done. Once `stop()` is true, what has been made so far is handed out.

        What is yielded was finished one round earlier, so that the caller works while the device
        does.
        """
        finished: list[Finished] = []
        while not stop():
            free = [i for i, job in enumerate(self._jobs) if job is None]
            self._fill(free, source(len(free)))
            if all(job is None for job in self._jobs) and not finished:
                return
            self._steps()
            yield finished
            finished = self._collect(False)
        yield finished
        yield self._collect(True)

    def _fill(self, free: list[int], jobs: list[Job]) -> None:
        placed = sorted(zip(free, jobs, strict=False), key=lambda pair: len(pair[1].prompt))
        while placed:
            # The longest first: a group is padded to its longest prompt.
            longest = len(placed[-1][1].prompt)
            length = min(-(-longest // 16) * 16, self.max_length)
            near = sum(3 * len(job.prompt) >= longest for _, job in placed)
            count = max(1, min(near, _PREFILL_TOKENS // length))
            self._prefill(placed[-count:], length)
            del placed[-count:]

    def _prefill(self, placed: list[tuple[int, Job]], length: int) -> None:
        device, s = self.net.device, self._s
        rows = []
        for slot, job in placed:
            n = len(job.prompt)
            if not 0 < n <= self.max_length - job.max_new:
                raise ValueError(f"a prompt of {n} tokens and {job.max_new} more do not fit")
            self._jobs[slot] = job
            rows.append([*job.prompt, *[0] * (length - n)])
        ids = torch.tensor(rows, device=device)
        slots = torch.tensor([slot for slot, _ in placed], device=device)
        counts = torch.tensor([len(job.prompt) for _, job in placed], device=device)
        attend = self.net.causal(len(rows), length, self._cache, slots)
        states, _ = self.net.forward(ids.flatten(), attend)
        last = states.view(len(rows), length, -1)[
            torch.arange(len(rows), device=device), counts - 1
        ]
        temperature = torch.tensor([job.temperature for _, job in placed], device=device)
        seeds = torch.tensor([job.seed for _, job in placed], device=device)
        chosen = self.net.ops.choose(self.net.logits(last), temperature, seeds, counts)
        limits = torch.tensor([job.max_new for _, job in placed], device=device)
        s.ids[slots], s.positions[slots] = chosen, counts
        s.made[slots], s.limits[slots] = torch.ones_like(counts), limits
        s.temperature[slots], s.seeds[slots] = temperature, seeds
        s.out[slots, 0] = chosen
        s.active[slots] = ~self._is_stop(chosen) & (limits > 1)

    def _is_stop(self, ids: Tensor) -> Tensor:
        return (ids[:, None] == self._stops).any(1)

    def _step(self, limit: int | None) -> None:
        """Runs every slot's token and draws the next; slots that are done repeat harmlessly."""
        net, s = self.net, self._s
        if limit is None:
            attend = net.decode(self._cache, s.positions)
        else:
            attend = net.cached(self._cache, s.positions[:, None], limit)
        states, _ = net.forward(s.ids, attend)
        chosen = net.ops.choose(net.logits(states), s.temperature, s.seeds, s.positions + 1)
        chosen = torch.where(s.active, chosen, s.ids)
        s.out.scatter_(1, s.made[:, None], chosen[:, None])
        s.made.add_(s.active)
        s.positions.add_(s.active)
        s.ids.copy_(chosen)
        s.active.logical_and_(~self._is_stop(chosen) & (s.made < s.limits))

    def _steps(self) -> None:
        if self.net.ops.decode_attention is None:
            for _ in range(self.stride):
                if not bool(self._s.active.any()):
                    return
                self._step(int(self._s.positions.max()) + 1)
            return
        if self._graph is None and self._use_graph:
            self._capture()
        for _ in range(self.stride):
            if self._graph is None:
                self._step(None)
            else:
                self._graph.replay()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        saved = [t.clone() for t in self._tensors()]
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels compile, cuBLAS takes its workspace
                self._step(None)
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, old in zip(self._tensors(), saved, strict=True):
            tensor.copy_(old)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step(None)

    def _tensors(self) -> list[Tensor]:
        s = self._s
        return [s.ids, s.positions, s.active, s.made, s.out]

    def _collect(self, everything: bool) -> list[Finished]:
        s = self._s
        loops = self._looping()
        s.active &= ~loops
        state = torch.stack((s.active.long(), s.made, loops.long())).tolist()
        active, made, looped = state
        done = [
            i
            for i, job in enumerate(self._jobs)
            if job is not None and (everything or not active[i])
        ]
        if not done:
            return []
        index = torch.tensor(done, device=self.net.device)
        out = s.out[index, : max(made[i] for i in done)].tolist()
        stops = set(self._stops.tolist())
        finished = []
        for row, slot in zip(out, done, strict=True):
            job = self._jobs[slot]
            assert job is not None
            ids = row[: made[slot]]
            finished.append(Finished(job, ids, ids[-1] in stops, bool(looped[slot])))
            self._jobs[slot] = None
            self.made_tokens += len(ids)
        s.active[index] = False
        return finished

    def _looping(self) -> Tensor:
        """Which active slots repeat themselves, bool [slots]."""
        s = self._s
        device, window = s.ids.device, _REPEATED + _PERIOD
        back = torch.arange(_REPEATED, device=device)
        last = (s.made[:, None] - 1 - back).clamp(min=0)
        periods = torch.arange(1, _PERIOD + 1, device=device)[:, None]
        shifted = (s.made[:, None, None] - 1 - back - periods).clamp(min=0)
        now = s.out.gather(1, last)[:, None]
        then = s.out.gather(1, shifted.flatten(1)).view(shifted.shape)
        same = (now == then).all(-1).any(-1)
        return same & s.active & (s.made >= window)
