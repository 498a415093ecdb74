"""What made published drafts weak without an error: padding in the loss, a template left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F

from draft_svc.training.batches import Batch
from draft_svc.training.chat import Chat, prompt_ids
from draft_svc.training.generate import GenerateOptions, generate
from draft_svc.training.objective import gather_slots
from draft_svc.training.shards import Manifest
from draft_svc.training.trainer import Trainer
from engine.errors import CheckpointError
from tests.training.toys import corpus_of, random_documents, tiny_target, trainer_of


def losses(trainer: Trainer, batch: Batch) -> Tensor:
    """Cross-entropy of every slot that counts, block by block."""
    draft = trainer.drafts[0]
    states, taps = trainer._target(batch)
    slots = gather_slots(
        batch.ids, batch.lengths, batch.anchors, batch.blocks, states, draft.spec.proposals
    )
    logits = F.linear(trainer.draft_states(draft, batch, taps), draft.net.head)
    each = F.cross_entropy(logits, slots.labels.flatten(), reduction="none")
    return each[slots.valid.flatten()]


@pytest.mark.parametrize("text", ["dflash", "dspark,rank=4,slots=next_token,block=7"])
def test_a_padded_batch_has_the_losses_of_its_rows(tmp_path: Path, text: str) -> None:
    """DF-4: labels and states are matched before anything is padded."""
    net = tiny_target(tmp_path)
    trainer = trainer_of(net, [text + ",taps=0/2"], corpus_of(random_documents(12)))
    batch, _ = next(trainer.batches.stream())
    lengths = set(batch.lengths.tolist())
    assert len(lengths) > 1 and max(lengths) < batch.ids.shape[1], "every row is padded"
    anchors = batch.anchors.shape[1]
    with torch.no_grad():
        together = losses(trainer, batch)
        alone = []
        for row, length in enumerate(batch.lengths.tolist()):
            own = batch.blocks[batch.blocks // anchors == row] - row * anchors
            single = Batch(
                batch.ids[row : row + 1, :length],
                batch.lengths[row : row + 1],
                batch.anchors[row : row + 1].clamp(max=length - 1),
                own,
                (length,) * len(batch.reach),
                0,
            )
            alone.append(losses(trainer, single))
    order = (batch.blocks // anchors).argsort(stable=True)
    assert torch.equal(order, torch.arange(len(order))), "blocks come row by row"
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)


TEMPLATE = (
    "{% if messages[0].role != 'system' %}w90 w91 {% endif %}"
    "{% for m in messages %}w92 {{ m.content }} w93 {% endfor %}"
    "{% if add_generation_prompt %}w94{% endif %}"
)


def document(template: str) -> bytes:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fields = {"tokenizer": json.loads(words.to_str()), "chat_template": template}
    return json.dumps(fields).encode()


def test_a_prompt_of_text_is_a_turn_of_the_targets_template() -> None:
    """DF-43: the default system prompt, the roles and where the assistant speaks are all there; a
    target without a template takes no text."""
    chat = Chat(document(TEMPLATE))
    wanted = [90, 91, 92, 11, 12, 93, 94]
    assert prompt_ids(chat, {"prompt": "w11 w12"}) == wanted != chat.encode("w11 w12")
    assert prompt_ids(chat, {"messages": [{"role": "user", "content": "w11 w12"}]}) == wanted
    system = [{"role": "system", "content": "w5"}, {"role": "user", "content": "w6"}]
    assert prompt_ids(chat, {"messages": system}) == [92, 5, 93, 92, 6, 93, 94]
    assert prompt_ids(chat, {"prompt": "w11 w12"}, template=False) == [11, 12]
    assert prompt_ids(chat, {"messages": system}, template=False) == [5, 6]
    with pytest.raises(CheckpointError, match="chat template"):
        prompt_ids(None, {"prompt": "w11"})
    with pytest.raises(CheckpointError, match="no chat template"):
        Chat(document(""))


def test_data_of_another_template_is_not_mixed_in(tmp_path: Path) -> None:
    """DF-43: the template is part of what names the data."""
    net = tiny_target(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"w{i} w{i + 1}"}) + "\n" for i in range(4)))
    options = GenerateOptions(5.0, 8, 2, 64, 8, own_prompts=False, graph=False)

    def run(template: str) -> None:
        chat = Chat(document(template))
        manifest = Manifest("target", chat.hash, 0.0, 0)
        generate(net, chat, tmp_path / "data", manifest, options, prompts, lambda _: None)

    run(TEMPLATE)
    with pytest.raises(CheckpointError, match="tokenizer"):
        run(TEMPLATE.replace("w90", "w89"))
