"""Runs the steps that an engine meets before there are sessions; `warm_shapes.py` says which."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from engine.api import Engine, Item, ItemResult, Sampling, WarmUp
from engine.compiling import compile_first
from engine.device_step import DeviceStepper
from engine.errors import SettingRefused
from engine.kv.pool import PageTable
from engine.meeting import met
from engine.warm_shapes import Shape, shapes

log = logging.getLogger(__name__)

_GREEDY = Sampling(temperature=0.0)
_FILTERED = Sampling(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01)
_NO_BIAS = ((0, 0.0),)


class Step(Protocol):
    """`Engine.step` that may be told to leave captures to later."""

    def __call__(self, items: Sequence[Item], *, capture: bool) -> Sequence[ItemResult]: ...


def run(engine: Engine, stepper: DeviceStepper, wanted: WarmUp, chunk: int, step: Step) -> int:
    """See `Engine.warm_up`. `chunk`: most rows of a prompt in one step."""
    _check_exports(wanted.exports, engine.info.layer_count)
    began = time.perf_counter()
    longest = engine.info.max_length
    projection = engine.info.projection
    projected = projection.taps if projection is not None else ()
    every = shapes(stepper, wanted, chunk, engine.rows_independent, longest, projected)
    held = [shape for shape in every if shape.start + shape.rows <= longest]

    def launched(items: Sequence[Item], *, capture: bool) -> Sequence[ItemResult]:
        return step(items, capture=False)

    compile_first(
        engine.info.device, partial(_meet_all, engine, held, launched, wanted), wanted.stopped
    )
    count = _meet_all(engine, held, step, wanted)
    if engine.info.device != "cpu":
        torch.cuda.empty_cache()  # what large steps took is for whoever needs it
    log.info("warmed %d step shapes in %.1f s", count, time.perf_counter() - began)
    return count


def _meet_all(engine: Engine, held: Sequence[Shape], step: Step, wanted: WarmUp) -> int:
    count = 0
    for shape in held:
        if wanted.stopped():
            break
        # What is not captured is of more sessions than were asked for.
        count += met(shape, shape.captured, partial(_meet, engine, shape, step))
    return count


def _check_exports(exports: tuple[int, ...], layers: int) -> None:
    if list(exports) != sorted(set(exports) & set(range(layers))):
        raise SettingRefused("warm_taps", exports, f"layers 0 to {layers - 1}, rising")


def _meet(engine: Engine, shape: Shape, step: Step) -> bool:
    tables: list[PageTable] = []
    try:
        for _ in range(shape.sessions):
            tables.append(engine.allocate(shape.start + shape.rows))
            # What the pages hold does not matter; nobody else sees them.
            tables[-1].length = shape.start
        step([_item(shape, table) for table in tables], capture=shape.captured)
        return True
    finally:
        for table in tables:
            table.free()


def _item(shape: Shape, table: PageTable) -> Item:
    sampling = _FILTERED if shape.filtered else _GREEDY
    if shape.launched:
        sampling = replace(sampling, logit_bias=_NO_BIAS)
    return Item(
        table=table,
        ids=[1] * shape.rows,
        start=shape.start,
        draws=shape.draws,
        sampling=sampling,
        taps=shape.taps,
        exact=shape.exact,
        drafted=shape.drafted,
        projected=shape.projected,
    )
