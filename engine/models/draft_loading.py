"""Loads block drafts from their checkpoints, and what they take from the target's.

A draft has its own embedding and head where its file holds them, and the target's otherwise.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.attention.resolution import Resolution
from engine.block_step import BlockStepper
from engine.default_model import resolve_model
from engine.device import kernel_mode
from engine.errors import CheckpointError
from engine.linear import Int8Linear, Linear, pack_linear
from engine.models.config import from_hf
from engine.models.dflash import DFlashModel, DraftTables
from engine.models.dflash_config import DFlashConfig
from engine.models.draft_context import ContextMemory
from engine.models.draft_dialects import Target, parse_draft
from engine.models.draft_options import DFlashOptions, choose_attention
from engine.models.draft_vocabulary import DraftVocabulary, read_vocabulary
from engine.models.dspark import DSparkModel
from engine.weights import MASK_VECTOR, Weights, fingerprint, read_json

_TURNED = ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")
_UNREADABLE = (
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    pickle.UnpicklingError,
)


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft and what the handshake says about it. `stepper` proposes where the draft runs on
    Triton's kernels."""

    model: DFlashModel
    name: str
    fingerprint: str
    target_fingerprint: str
    stepper: BlockStepper | None = None


class DraftTarget:
    """The target's checkpoint as drafts see it. Its embedding is read when a draft asks, and what
    several drafts share (the embedding, the packed head) is held once. Raises CheckpointError.
    """

    def __init__(self, reference: str, weight_dtype: torch.dtype = torch.bfloat16) -> None:
        self._directory, self._dtype = resolve_model(reference).directory, weight_dtype
        raw = read_json(self._directory / "config.json")
        self.model = from_hf(raw)
        self.described = Target(self.model, raw.get("architectures") or ())
        self._embeddings: dict[torch.device, Tensor] = {}
        self._heads: dict[tuple[Any, ...], Linear] = {}
        self._shared: Linear | None = None

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self._directory)

    def _take(self, name: str, device: torch.device) -> Tensor:
        weights = Weights(self._directory, self._dtype, device)
        return weights.take(name, self.model.vocab_size, self.model.hidden_size)

    def embedding(self, device: torch.device) -> Tensor:
        """[vocabulary, hidden]."""
        if device not in self._embeddings:
            self._embeddings[device] = self._take("model.embed_tokens.weight", device)
        return self._embeddings[device]

    def share(self, embedding: Tensor, head: Linear) -> None:
        """Takes those of a target in this process: the drafts read no copies. A draft that wants
        its head in other kernels packs one of its own."""
        self._embeddings[embedding.device] = embedding
        self._shared = head

    def head(self, vocabulary: DraftVocabulary, options: DFlashOptions) -> Linear:
        """The packed head, or the first rows of it."""
        whole = vocabulary.order is None and vocabulary.rows == self.model.vocab_size
        if self._shared is not None and whole and not options.int8_head:
            return self._shared
        device = options.device
        key = (vocabulary.rows, options.int8_head, kernel_mode(options.kernels, device), device)
        if key not in self._heads:
            tied = self.model.tied_head
            weight = self.embedding(device) if tied else self._take("lm_head.weight", device)
            self._heads[key] = _pack_head(vocabulary.pick(weight), options)
        return self._heads[key]


class _Interleaved(Weights):
    """A checkpoint whose rotation turns values 2i and 2i + 1 of a head together: put in the order
    in which ours turns i and i + dim / 2. Queries and keys move alike, so their products stay.
    """

    def __init__(
        self, directory: Path, dtype: torch.dtype, device: torch.device, head_dim: int
    ) -> None:
        super().__init__(directory, dtype, device)
        self._head_dim = head_dim

    def take(self, name: str, *shape: int, **options: Any) -> Tensor:
        tensor = super().take(name, *shape, **options)
        if not name.endswith(_TURNED):
            return tensor
        pairs = tensor.view(-1, self._head_dim // 2, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)


def load_draft(
    checkpoint: Path, target: DraftTarget, options: DFlashOptions, method: str
) -> LoadedDraft:
    """Loads a checkpoint of any layout that `draft_dialects` reads, for `method`. Raises
    CheckpointError, and AttentionRefused before any weight is read."""
    config = parse_draft(read_json(checkpoint / "config.json"), target.described, method)
    attention = choose_attention(config, options, method)
    return build_draft(checkpoint, config, target, options, attention, method)


def build_draft(
    checkpoint: Path,
    config: DFlashConfig,
    target: DraftTarget,
    options: DFlashOptions,
    attention: Resolution,
    method: str,
    memory: ContextMemory | None = None,
) -> LoadedDraft:
    """Reads the weights of a draft whose config was parsed and whose attention is resolved;
    `memory` as in `DFlashModel`."""
    draft = _open(checkpoint, config, options)
    tables = _tables(checkpoint, config, draft, target, options)
    kind = DSparkModel if method == "dspark" else DFlashModel
    model = kind(config, draft, tables, options, attention, memory)
    draft.finish()
    stepper = BlockStepper(model) if model.kernels.mode == "triton" else None
    names = checkpoint.name, fingerprint(checkpoint), target.fingerprint
    return LoadedDraft(model, *names, stepper)


def _open(checkpoint: Path, config: DFlashConfig, options: DFlashOptions) -> Weights:
    if config.rope_interleaved and config.latent is None:
        return _Interleaved(checkpoint, options.weight_dtype, options.device, config.head_dim)
    return Weights(checkpoint, options.weight_dtype, options.device)


def _tables(
    checkpoint: Path,
    config: DFlashConfig,
    draft: Weights,
    target: DraftTarget,
    options: DFlashOptions,
) -> DraftTables:
    """Embedding and head: the draft's own where its file has them. A head with fewer rows, or of
    another width, than the target's cannot be the target's."""
    vocabulary, own = read_vocabulary(draft, config, options.head_rows), "lm_head.weight"
    trimmed = config.draft_vocab_size < config.vocab_size
    foreign = config.hidden_size != config.target_hidden_size
    if "embed_tokens.weight" in draft or foreign:
        embedding = draft.take("embed_tokens.weight", config.vocab_size, config.hidden_size)
    else:
        embedding = target.embedding(options.device)
    if own in draft or trimmed or foreign:
        weight = draft.take(own, config.draft_vocab_size, config.hidden_size)
        head = _pack_head(vocabulary.pick(weight), options)
    elif vocabulary.order is not None:
        raise CheckpointError("tensor d2t reorders the head; accepted: with its own lm_head.weight")
    else:
        head = target.head(vocabulary, options)
    mask = read_mask_vector(checkpoint, config, draft.device)
    return DraftTables(embedding, head, vocabulary, mask)


def _pack_head(weight: Tensor, options: DFlashOptions) -> Linear:
    if options.int8_head:
        return Int8Linear(weight)
    return pack_linear(weight, kernel_mode(options.kernels, options.device))


def read_mask_vector(checkpoint: Path, config: DFlashConfig, device: torch.device) -> Tensor | None:
    """What masked slots are made of, fp32 [hidden], where the checkpoint has a file for it: a
    tensor, or a dict of `embedding` and `mask_token_id`. Nothing in the file is run. Raises
    CheckpointError.
    """
    path = checkpoint / MASK_VECTOR
    if not path.is_file():
        return None
    try:
        stored: Any = torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE:
        raise CheckpointError(f"{MASK_VECTOR} cannot be read as a file of plain tensors") from None
    if isinstance(stored, dict):
        named = stored.get("mask_token_id", config.mask_token_id)
        if named != config.mask_token_id:
            raise CheckpointError(
                f"{MASK_VECTOR} is for mask_token_id {named!r}, the config says "
                f"{config.mask_token_id}"
            )
        stored = stored.get("embedding")
    if not isinstance(stored, Tensor) or not stored.is_floating_point():
        raise CheckpointError(f"{MASK_VECTOR} holds no tensor; accepted: one, or `embedding`")
    if stored.numel() != config.hidden_size or stored.shape[-1] != config.hidden_size:
        raise CheckpointError(
            f"{MASK_VECTOR} has shape {list(stored.shape)}, expected [{config.hidden_size}]"
        )
    if not bool(stored.isfinite().all()):
        raise CheckpointError(f"{MASK_VECTOR} has values that are not finite")
    return stored.detach().float().flatten().to(device)


def load_dflash(checkpoint: Path, target: str, options: DFlashOptions | None = None) -> LoadedDraft:
    """`load_draft` of one DFlash draft alone."""
    options = options or DFlashOptions()
    return load_draft(checkpoint, DraftTarget(target, options.weight_dtype), options, "dflash")


def load_dspark(checkpoint: Path, target: str, options: DFlashOptions | None = None) -> LoadedDraft:
    """`load_draft` of one DSpark draft alone."""
    options = options or DFlashOptions()
    return load_draft(checkpoint, DraftTarget(target, options.weight_dtype), options, "dspark")
