"""The commands of this room, registered through the entry-point group `specwire.commands`."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from engine.attention.asked import (
    Asked,
    Pairing,
    answer,
    check_matrix,
)
from engine.attention.devices import PROFILES, simulated
from engine.attention.listing import HEADER, listing
from engine.attention.matrix import matrix
from engine.attention.outcome import as_json
from engine.attention.vllm_keys import with_speculative_config, with_target_backend
from engine.errors import EngineError


def register(app: typer.Typer) -> None:
    app.command()(backends)


def _option(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text)


def backends(
    device: Annotated[str, _option(f"One of {', '.join(PROFILES)}.")] = "cpu",
    role: Annotated[str, _option("target or draft.")] = "target",
    model: Annotated[str, _option("Checkpoint directory; only config.json is read.")] = "",
    target: Annotated[
        list[str] | None, _option("Checkpoint of the target beside the draft; may be repeated.")
    ] = None,
    attention_backend: Annotated[str, _option("auto, inherit, or a name.")] = "",
    kv_dtype: Annotated[str, _option("KV dtype of this role.")] = "auto",
    cuda_graph_mode: Annotated[str, _option("auto, or a mode that must be had.")] = "auto",
    page_tokens: Annotated[int | None, _option("Tokens of one KV page.")] = None,
    dcp: Annotated[int, _option("Decode context parallelism.")] = 1,
    tp: Annotated[int | None, _option("Tensor parallelism; unset: as dcp.")] = None,
    num_speculative_tokens: Annotated[int | None, _option("Draft tokens a round.")] = None,
    colocated: Annotated[bool, _option("The draft runs in the target's process.")] = False,
    kv_group: Annotated[
        str, _option("same_cache, pooled or private; unset: what the two models allow.")
    ] = "",
    engine: Annotated[str, _option("native, vllm, or auto: native on the CPU.")] = "auto",
    target_attention_backend: Annotated[str, _option("The target's own, with --target.")] = "",
    target_kv_dtype: Annotated[str, _option("The target's own, with --target.")] = "auto",
    target_dcp: Annotated[int | None, _option("The target's own; unset: as --dcp.")] = None,
    speculative_config: Annotated[
        str, _option("JSON with vLLM's keys; where it names a model, --model may be the target.")
    ] = "",
    vllm_backend: Annotated[
        str, _option("The target's backend, as vLLM spells it.", "--attention-config.backend")
    ] = "",
    show_matrix: Annotated[
        bool, _option("Every kind of target beside every kind of draft.", "--matrix")
    ] = False,
    show_list: Annotated[
        bool, _option("The table of declared limits of every backend.", "--list")
    ] = False,
    as_json_: Annotated[bool, _option("One JSON object.", "--json")] = False,
) -> None:
    """Judge attention backends before anything is loaded: what runs, and why not another.

    Needs no GPU: devices are simulated. Exit status: 0 resolved, 2 refused.

    Examples:

    \b
      specwire backends --device sm100 --matrix
      specwire backends --device sm90 --model ./Qwen3-8B
      specwire backends --device sm100 --role draft --model ./draft --dcp 8
    """
    asked = Asked(
        device=device,
        role=role,
        model=model,
        targets=tuple(target or ()),
        attention_backend=attention_backend or None,
        kv_dtype=kv_dtype,
        cuda_graph_mode=cuda_graph_mode,
        page_tokens=page_tokens,
        dcp=dcp,
        tp=tp,
        draft_tokens=num_speculative_tokens,
        colocated=colocated,
        group=kv_group,
        engine=engine,
        target_attention_backend=target_attention_backend or None,
        target_kv_dtype=target_kv_dtype,
        target_dcp=target_dcp,
    )
    if show_list:
        _print_list(as_json_)
        return
    try:
        if show_matrix:
            check_matrix(asked)
            _print_matrix(asked, as_json_)
            return
        if speculative_config:
            asked = with_speculative_config(asked, speculative_config)
        pairings = answer(with_target_backend(asked, vllm_backend))
    except EngineError as error:
        if as_json_:
            print(json.dumps({"resolved": False, "error": str(error)}))
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    _print(pairings, as_json_)
    if not all(pairing.resolved for pairing in pairings):
        raise typer.Exit(2)


def _print_list(as_json_: bool) -> None:
    if as_json_:
        rows = [dict(zip(HEADER, row, strict=True)) for row in listing()]
        print(json.dumps({"backends": rows}))
        return
    from engine.attention import view

    view.show_list(view.console())


def _print_matrix(asked: Asked, as_json_: bool) -> None:
    cells = matrix(simulated(asked.device), asked.dcp, asked.kv_dtype)
    if as_json_:
        found = [cell.to_json() for cell in cells]
        print(json.dumps({"device": asked.device, "dcp": asked.dcp, "pairings": found}))
        return
    from engine.attention import view

    view.show_matrix(view.console(), asked.device, cells)


def _print(pairings: list[Pairing], as_json_: bool) -> None:
    if not as_json_:
        from engine.attention import view

        view.show_pairings(view.console(), pairings)
        return
    found = [
        as_json(one.outcome) | {"target": as_json(one.target) if one.target else None}
        for one in pairings
    ]
    if len(found) == 1:
        print(json.dumps(found[0] | {"resolved": pairings[0].resolved}))
        return
    resolved = all(pairing.resolved for pairing in pairings)
    print(json.dumps({"resolved": resolved, "pairings": found}))
