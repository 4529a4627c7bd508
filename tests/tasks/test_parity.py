"""Losses equal those of Hugging Face's Trainer on the same batches, with and without packing."""

from pathlib import Path

import pytest
from benchmarks.fine_tuning.trainer_peer import batches, train

from sansgpu.models.huggingface import lora
from sansgpu.models.huggingface.pretrained import Head, load_pretrained
from sansgpu.tasks.classify.objective import ClassifyObjective
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.registry import TASKS
from sansgpu.tasks.tokens.objective import TokensObjective
from tests.tasks.folders import chat_rows, conll, labeled_rows, model_folder, squad
from tests.tasks.parity import ROWS, STEPS, our_losses, settings

PACK = [True, pytest.param(False, marks=pytest.mark.long)]


@pytest.mark.parametrize("pack", PACK)
@pytest.mark.parametrize(
    "architecture", ["gemma2", *(pytest.param(a, marks=pytest.mark.long) for a in ("qwen2", "gpt2"))]
)
def test_conversations(tmp_path: Path, architecture: str, pack: bool) -> None:
    dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if architecture == "gpt2" else {}
    asked = settings("sft", model_folder(architecture, **dropped), chat_rows(tmp_path / "rows.jsonl"), pack)
    ours = our_losses(asked, micro_batch=ROWS)
    config, tokenizer, given = batches(asked, STEPS, tmp_path)
    theirs = train(config, tokenizer, given, ROWS, 1).losses
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert ours[-1] < ours[0] - 0.5
    assert our_losses(asked, micro_batch=1) == pytest.approx(ours, abs=1e-4)


@pytest.mark.parametrize("pack", PACK)
@pytest.mark.parametrize("architecture", ["roberta", pytest.param("bert", marks=pytest.mark.long)])
def test_questions(tmp_path: Path, architecture: str, pack: bool) -> None:
    """The Trainer's loss includes padding in the softmax, so it gets single windows, which need no padding."""
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    asked = settings("qa", model_folder(architecture, **still), squad(tmp_path / "squad.json", paragraphs=60), pack)
    ours = our_losses(asked, micro_batch=ROWS)
    config, tokenizer, given = batches(asked, STEPS, tmp_path)
    model = load_pretrained(config.model, Head("qa"), config.training.seed)  # with the same random head as ours
    theirs = train(config, tokenizer, given, 1, ROWS, model).losses
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert ours[-1] < ours[0] - 0.5


LABELED = [
    ("bert", "multiple", True), ("modernbert", "single", True), ("deberta-v2", "single", True),
    ("bert", "regression", True), ("mpnet", "single", True),
    ("bert", "single", True), ("bert", "single", False), ("roberta", "single", True), ("distilbert", "single", True),
    ("qwen2", "single", True),
]  # fmt: skip
STILL = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "roberta": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "distilbert": {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    "modernbert": {"local_attention": 4},  # two tokens on each side, fewer than the texts have
    "mpnet": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "deberta-v2": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pooler_dropout": 0.0},
    "qwen2": {"classifier_dropout": 0.0},
}


@pytest.mark.parametrize(
    ("architecture", "kind", "pack"), [LABELED[0], *(pytest.param(*c, marks=pytest.mark.long) for c in LABELED[1:])]
)
def test_labels(tmp_path: Path, architecture: str, kind: str, pack: bool) -> None:
    rows = labeled_rows(tmp_path / "rows.jsonl", kind, pairs=kind == "single")
    asked = settings("classify", model_folder(architecture, **STILL.get(architecture, {})), rows, pack)
    ours = our_losses(asked, micro_batch=1)
    config, tokenizer, given = batches(asked, STEPS, tmp_path)
    head = ClassifyObjective.head_of(config)
    assert ClassifyObjective(config).unpadded.packs == pack
    plain = load_pretrained(config.model, head, config.training.seed)  # with the same random head as ours
    theirs = train(config, tokenizer, given, ROWS, 1, plain).losses
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert min(ours[-5:]) < ours[0] - 0.05
    together = our_losses(asked, micro_batch=ROWS)
    assert together == pytest.approx(theirs, abs=1e-4)


OTHERS = ("roberta", "modernbert", "qwen2")


@pytest.mark.parametrize(
    ("architecture", "pack"),
    [
        ("bert", True),
        *(pytest.param(a, pack, marks=pytest.mark.long) for a, pack in [("bert", False), *((a, True) for a in OTHERS)]),
    ],
)
def test_tags(tmp_path: Path, architecture: str, pack: bool) -> None:
    model = model_folder(architecture, **STILL.get(architecture, {}))
    asked = settings("tokens", model, conll(tmp_path / "tags.conll", 100), pack)
    asked += ["data.max_length=24", "data.doc_stride=4"]
    ours = our_losses(asked, micro_batch=1)
    config, tokenizer, given = batches(asked, STEPS, tmp_path)
    assert TokensObjective(config).unpadded.packs == pack
    plain = load_pretrained(config.model, TokensObjective.head_of(config), config.training.seed)
    theirs = train(config, tokenizer, given, ROWS, 1, plain).losses
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert ours[-1] < ours[0] - 0.5
    assert our_losses(asked, micro_batch=ROWS) == pytest.approx(theirs, abs=1e-4)


def test_an_adapter_on_the_head_takes_part(tmp_path: Path) -> None:
    rows = chat_rows(tmp_path / "rows.jsonl")
    asked = settings("sft", model_folder("llama"), rows, pack=True)
    config, _ = load_config(None, [*asked, "model.adapter=lora", "model.lora_targets=[lm_head]"])
    kind = TASKS["sft"]
    task = kind(config, kind.prepare(config, tmp_path, lambda *_: None)[1], ROWS)
    task.loss(task.batch(0)).backward()
    trained = {name: p for name, p in task.model.named_parameters() if p.requires_grad}
    assert set(trained) == {"lm_head.lora_A.default.weight", "lm_head.lora_B.default.weight"}
    grad = trained["lm_head.lora_B.default.weight"].grad
    assert grad is not None
    assert grad.abs().sum() > 0


def test_our_adapters_train_as_those_of_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = settings("sft", model_folder("qwen2"), chat_rows(tmp_path / "rows.jsonl"), pack=True)
    losses = []
    for least_rows in (1, 1 << 30):  # with our kernel, and with peft's code
        monkeypatch.setattr(lora, "MIN_ROWS", least_rows)
        losses.append(our_losses([*asked, "model.adapter=lora", "training.learning_rate=0.01"], micro_batch=ROWS))
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert losses[0] != losses[1]  # both ran: they sum in different orders
    assert losses[0][-1] < losses[0][0] - 0.5
