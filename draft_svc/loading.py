"""Builds the methods that the settings ask for; runs on the engine thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from draft_svc.methods.base import AnyMethod
from draft_svc.methods.dflash import DFlashMethod
from draft_svc.methods.draft_model import DraftModelMethod
from draft_svc.methods.dspark import DSparkMethod
from draft_svc.methods.hybrid import HybridMethod
from draft_svc.methods.ngram import NgramMethod
from engine.default_model import tokenizer_document, tokenizer_hash
from engine.device import device_name, kernel_mode, resolve_device, use_device, weight_dtype
from engine.errors import BackendUnavailable, CheckpointError, SettingRefused
from engine.linear import int8_is_fast
from engine.loading import load_engine
from engine.models.dflash_config import DFlashConfig
from engine.models.draft_dialects import parse_draft
from engine.models.draft_loading import DraftTarget, load_draft
from engine.models.draft_options import DFlashOptions, choose_attention
from engine.tokenizer import token_table
from engine.weights import read_json
from specwire.errors import Reason, SpecwireError

if TYPE_CHECKING:
    from draft_svc.settings import DraftSettings

Progress = Callable[[str], None]
Target = Callable[[], DraftTarget]
Builder = Callable[["DraftSettings", Target], AnyMethod]

METHODS = ("ngram", "hybrid", "draft_model", "dflash", "dspark")
# What is hosted when nothing is asked for; the last one is the default.
DEFAULT_METHODS = ("ngram", "hybrid", "dspark", "dflash")
_SHIPPED = Path(__file__).parent / "checkpoints"
DEFAULT_DRAFT, DEFAULT_DSPARK = _SHIPPED / "smollm2-135m-dflash", _SHIPPED / "smollm2-135m-dspark"


def load_methods(settings: DraftSettings, progress: Progress) -> dict[str, AnyMethod]:
    """Loads each method, telling about it first. Raises typed errors for what cannot be loaded."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    loaded: dict[str, AnyMethod] = {}
    # Embedding and packed head are held once, whatever drafts use them.
    target = cache(lambda: DraftTarget(settings.target, weight_dtype(settings.dtype)))
    # What `hybrid` chooses from is loaded before it, and once only.
    for name in sorted(settings.methods, key=lambda name: name == "hybrid"):
        if name == "hybrid":
            loaded[name] = _hybrid(settings, target, loaded, progress)
        else:
            loaded[name] = _load(name, settings, target, progress)
    return {name: loaded[name] for name in settings.methods}


def _load(name: str, settings: DraftSettings, target: Target, progress: Progress) -> AnyMethod:
    progress(f"loading {name}")
    try:
        return _BUILDERS[name](settings, target)
    except CheckpointError as error:
        raise SpecwireError(Reason.CHECKPOINT_INVALID, f"{name}: {error}") from error
    except BackendUnavailable as error:
        raise SpecwireError(Reason.BACKEND_UNAVAILABLE, f"{name}: {error}") from error
    except SettingRefused as error:
        raise SpecwireError(Reason.SETTINGS_INVALID, f"{name}: {error}") from error


def _hybrid(
    settings: DraftSettings,
    target: Target,
    loaded: dict[str, AnyMethod],
    progress: Progress,
) -> AnyMethod:
    name = settings.hybrid_neural
    hosted = loaded.get(name)
    neural = hosted or _load(name, settings, target, progress)
    return HybridMethod(_lookup(settings), neural, owns_neural=hosted is None)


def _lookup(settings: DraftSettings, _: Target | None = None) -> NgramMethod:
    return NgramMethod(
        min_n=settings.ngram_min,
        max_n=settings.ngram_max,
        max_draft_tokens=settings.max_draft_tokens,
    )


def _draft_model(settings: DraftSettings, _: Target) -> AnyMethod:
    document = tokenizer_document(settings.draft_model)
    tokens = token_table(document)
    return DraftModelMethod(
        load_engine(settings.engine_config(settings.draft_model, "draft")),
        max_draft_tokens=settings.max_draft_tokens,
        tokenizer_hash=_tokenizer_of_pair(document, tokens, settings.target),
        known_ids=max(tokens, default=-1) + 1,
        chunk_tokens=settings.prefill_chunk_tokens,
        warm_sessions=settings.warm_sessions,
    )


def _tokenizer_of_pair(document: bytes, tokens: dict[int, str], target: str) -> str:
    """The hash that the handshake compares. A chat template or an end token of its own do not
    matter to a drafter: with the same token behind every id it has the target's tokenizer.
    """
    try:
        targets = tokenizer_document(target)
    except CheckpointError:  # not on this machine: only the same document will do
        return tokenizer_hash(document)
    same = bool(tokens) and token_table(targets) == tokens
    return tokenizer_hash(targets if same else document)


def _dflash(settings: DraftSettings, target: Target) -> AnyMethod:
    path = checkpoint_path("draft", settings.draft, DEFAULT_DRAFT)
    return _block_drafter(DFlashMethod, path, target(), settings)


def _dspark(settings: DraftSettings, target: Target) -> AnyMethod:
    path = checkpoint_path("dspark", settings.dspark, DEFAULT_DSPARK)
    return _block_drafter(DSparkMethod, path, target(), settings)


def _block_drafter(
    method: type[DFlashMethod], path: Path, target: DraftTarget, settings: DraftSettings
) -> AnyMethod:
    options = _options(settings, path, target, method.name)
    on_gpu = options.device.type == "cuda"
    return method(
        load_draft(path, target, options, method.name),
        max_draft_tokens=settings.max_draft_tokens,
        max_length=settings.max_length,
        tokenizer_hash=tokenizer_hash(tokenizer_document(settings.target)),
        confidences=settings.confidences,
        warm_sessions=settings.warm_sessions if on_gpu else 0,
    )


def checkpoint_path(field: str, reference: str, shipped: Path) -> Path:
    """The directory that a setting names. Raises SpecwireError, at start: it names the directory
    as it was given."""
    path = shipped if reference == "default" else Path(reference).expanduser()
    if not (path / "config.json").is_file():
        accepted = 'a local directory with a config.json, or "default"'
        raise SpecwireError.field(field, reference, accepted, Reason.CHECKPOINT_INVALID)
    return path


def _options(
    settings: DraftSettings, checkpoint: Path, target: DraftTarget, method: str
) -> DFlashOptions:
    config = parse_draft(read_json(checkpoint / "config.json"), target.described, method)
    device = resolve_device(settings.device)
    use_device(device)
    options = DFlashOptions(
        device=device,
        page_tokens=settings.page_tokens,
        kv_dtype=settings.kv_dtype,
        weight_dtype=weight_dtype(settings.dtype),
        kernels=settings.kernels,
        attention_backend=settings.attention_backend,
        cuda_graph_mode=settings.cuda_graph_mode,
        int8_head=head_in_int8(settings.head_dtype, settings.dtype, settings.kernels, device),
    )
    return replace(options, page_count=_page_count(settings, config, options, method))


def head_in_int8(head_dtype: str, dtype: str, kernels: str, device: torch.device) -> bool:
    """A proposal is a hint, and the head is most of its cost: int8 where that is faster. Raises
    SettingRefused where it cannot be."""
    on_cpu = device.type == "cpu" and kernel_mode(kernels, device) != "triton"
    if head_dtype == "int8" and not on_cpu:
        kind = f"auto, model: on {device_name(device)} with these kernels int8 is the cpu's alone"
        raise SettingRefused("head_dtype", head_dtype, kind)
    if head_dtype == "auto":
        return on_cpu and weight_dtype(dtype) is torch.bfloat16 and int8_is_fast()
    return head_dtype == "int8"


def _page_count(
    settings: DraftSettings, config: DFlashConfig, options: DFlashOptions, method: str
) -> int:
    if settings.kv_pages is not None:
        return settings.kv_pages
    geometry = choose_attention(config, options, method).geometry
    count = settings.kv_memory_mb * 2**20 // (geometry.bytes_per_token * geometry.page_tokens)
    if count == 0:
        accepted = "enough for one page"
        field, value = "kv_memory_mb", settings.kv_memory_mb
        raise SpecwireError.field(field, value, accepted, Reason.SETTINGS_INVALID)
    return count


_BUILDERS: dict[str, Builder] = {
    "ngram": _lookup,
    "draft_model": _draft_model,
    "dflash": _dflash,
    "dspark": _dspark,
}
