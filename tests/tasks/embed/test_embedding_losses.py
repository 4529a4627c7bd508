"""Losses of embedding models equal those of Sentence Transformers, and do not depend on the micro-batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.losses import (
    CosineSimilarityLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
    TripletLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling

from sansgpu.machine.distributed.group import SINGLE_PROCESS
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.embed.groups import TextGroups
from sansgpu.tasks.embed.losses import embedding_loss
from sansgpu.tasks.embed.task import TextEmbedding
from sansgpu.train.step import GradientCache
from tests.tasks.folders import model_folder
from tests.tasks.parity import ROWS, STEPS, our_losses
from tests.tasks.texts import embed_settings, text_rows

STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OFTEN = ("triplets",)  # the other losses are compared before a release
LOSSES = {
    "pairs": MultipleNegativesRankingLoss,
    "triplets": MultipleNegativesRankingLoss,
    "triplet": TripletLoss,
    "scores": CosineSimilarityLoss,
    "matryoshka": lambda model: MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), [64, 16]),
}


def prepared(asked: list[str]) -> TextEmbedding:
    config, _ = load_config(None, asked)
    config, corpus = TextEmbedding.prepare(config, Path("unused"), lambda *_: None)
    return TextEmbedding(config, corpus, ROWS)


def columns(batch: TextGroups) -> list[dict[str, torch.Tensor]]:
    """Returns the padded inputs of all anchors, all positives, and so on. Rows must have the same number of texts."""
    texts = batch.tokens.split(batch.lengths.tolist())
    count = int(batch.counts[0])
    assert (batch.counts == count).all()
    padded = [torch.nn.utils.rnn.pad_sequence(list(texts[n::count]), batch_first=True) for n in range(count)]
    lengths = [batch.lengths[n::count] for n in range(count)]
    masks = [(torch.arange(ids.shape[1]) < size[:, None]).long() for ids, size in zip(padded, lengths, strict=True)]
    return [{"input_ids": ids, "attention_mask": mask} for ids, mask in zip(padded, masks, strict=True)]


def their_losses(folder: Path, kind: str, batches: Sequence[TextGroups], lr: float) -> list[float]:
    transformer = Transformer(str(folder))
    model = SentenceTransformer(modules=[transformer, Pooling(transformer.get_embedding_dimension())], device="cpu")
    loss: Any = LOSSES[kind](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.999), weight_decay=0.0)
    losses = []
    for batch in batches:
        value = loss(columns(batch), batch.scores)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in OFTEN else pytest.mark.long) for k in LOSSES])
def test_first_losses_are_those_of_sentence_transformers(tmp_path: Path, kind: str) -> None:
    form = {"triplet": "triplets", "matryoshka": "pairs"}.get(kind, kind)
    rows = text_rows(tmp_path / "rows.jsonl", form)
    if form == "triplets":  # Sentence Transformers needs the same number of negatives in each row
        rows.write_text("".join(line for line in rows.open(encoding="utf-8") if '"negative": [' not in line))
    more = {"triplet": {"training__embedding_loss": "triplet"}, "matryoshka": {"training__matryoshka_dims": [64, 16]}}
    folder = model_folder("bert", **STILL)
    changes = {"data__validation_name": rows, "training__learning_rate": 0.001, **more.get(kind, {})}
    asked = embed_settings(folder, rows, **changes)
    ours = our_losses(asked, micro_batch=ROWS)
    task = prepared(asked)
    theirs = their_losses(folder, kind, [task.batch(step) for step in range(STEPS)], 0.001)
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert ours[-1] < ours[0]
    assert our_losses(asked, micro_batch=1) == pytest.approx(ours, abs=1e-4)


@pytest.mark.parametrize("form", ["triplets", "labels"])
def test_cached_gradients_are_those_of_the_whole_step(tmp_path: Path, form: str) -> None:
    """The model uses dropout: the second pass of a micro-batch must repeat the masks of the first."""
    rows = text_rows(tmp_path / "rows.jsonl", form)
    task = prepared(embed_settings(model_folder("bert"), rows, data__validation_name=rows))
    task.model.train()
    pieces = list(task.batch(0).micro_batches(1))
    assert len(pieces) == ROWS

    def gradients() -> list[torch.Tensor]:
        found = [p.grad for p in task.model.parameters() if p.grad is not None]
        task.model.zero_grad()
        return found

    outputs = []
    for number, piece in enumerate(pieces):
        torch.manual_seed(number)
        outputs.append(task.outputs(piece))
    whole = task.step_loss(torch.cat(outputs), pieces)
    whole.backward()
    expected = gradients()
    cache = GradientCache(task, SINGLE_PROCESS, [pieces], torch.manual_seed)
    total = 0.0
    for number, piece in enumerate(pieces):
        torch.manual_seed(number)
        loss = cache.loss(piece, pieces[number + 1 :], number)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(float(whole), abs=1e-6)
    for found, wanted in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_texts_of_one_meaning_are_no_negatives(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    pair = '{"anchor": "red %s", "positive": "old hill"}\n'
    rows.write_text("".join(pair % name for name in ("house", "cat", "dog", "door")))
    task = prepared(embed_settings(model_folder("bert", **STILL), rows, data__validation_name=rows))
    assert float(task.loss(task.batch(0))) == pytest.approx(0.0, abs=1e-6)


def test_positives_of_labels_change_with_the_epoch_only(tmp_path: Path) -> None:
    rows = text_rows(tmp_path / "rows.jsonl", "labels", count=8)
    task = prepared(embed_settings(model_folder("bert"), rows, data__validation_name=rows))
    epochs = [torch.cat([task.batch(step).tokens for step in steps]).tolist() for steps in ((0, 1), (0, 1), (2, 3))]
    assert epochs[0] == epochs[1]
    assert sorted(epochs[0]) != sorted(epochs[2])
    for batch in (task.batch(0), task.batch(3)):
        assert batch.meanings[batch.starts].tolist() == batch.meanings[batch.starts + 1].tolist()


# Rows that share texts: equal positives, equal anchors, and a positive that is an anchor or a negative elsewhere.
SHARED = [
    ("red house", "old hill"), ("red cat", "old hill", "new door"), ("red house", "new dog"),
    ("old hill", "red house", "a cat"), ("new door", "a cat", "old hill", "red cat"), ("a dog", "a dog", "new dog"),
]  # fmt: skip


def reference_loss(vectors: torch.Tensor) -> float:
    """Computes the ranking loss of SHARED in float64, one candidate at a time."""
    unit = iter(torch.nn.functional.normalize(vectors.double(), dim=-1))
    rows = [[(text, next(unit)) for text in texts] for texts in SHARED]
    total = 0.0
    for (anchor, query), (positive, answer), *_ in rows:
        others = [
            vector
            for (own, _), *candidates in rows
            for place, (text, vector) in enumerate(candidates)
            if text not in (anchor, positive) and not (place == 0 and own == anchor)
        ]
        scores = torch.stack([20 * query @ vector for vector in (answer, *others)])
        total += float(scores.logsumexp(0) - scores[0])
    return total


def test_equal_texts_and_positives_of_an_equal_anchor_are_no_negatives(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    named = [{"anchor": anchor, "positive": positive, "negatives": more} for anchor, positive, *more in SHARED]
    rows.write_text("\n".join(map(json.dumps, named)))
    task = prepared(embed_settings(model_folder("bert", **STILL), rows, data__validation_name=rows))
    batch = task.corpus.train.batch(np.arange(len(SHARED)))
    vectors = torch.randn(len(batch.lengths), 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert float(embedding_loss("ranking", (), vectors, batch)) == pytest.approx(reference_loss(vectors), rel=1e-12)
    shuffled = TextGroups.joined([batch.rows(3, 6), batch.rows(0, 3)])  # the order of the examples does not matter
    first = int(batch.counts[:3].sum())
    again = embedding_loss("ranking", (), torch.cat([vectors[first:], vectors[:first]]), shuffled)
    assert float(again) == pytest.approx(reference_loss(vectors), rel=1e-12)
    whole, parts = task.step_loss(task.outputs(batch), [batch]), list(batch.micro_batches(1))
    split = task.step_loss(torch.cat([task.outputs(part) for part in parts]), parts)
    assert float(split) == pytest.approx(float(whole), rel=1e-5)
