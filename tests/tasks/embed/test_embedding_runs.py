"""Embedding runs export Sentence Transformers folders, and compute vectors; errors are one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tools.tiny_architectures import make_architecture, tokenizer_for
from transformers import AutoModel

from sansgpu.cli import run as cli
from sansgpu.jobs.embed import LEAST_TEXTS
from sansgpu.kernels import library
from sansgpu.models.formats.safetensors_file import load_weights
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.embed.task import TextEmbedding
from tests.processes import as_options, events_of, write_rows
from tests.tasks.fine_tuned import Captured, sentence
from tests.tasks.folders import model_folder
from tests.tasks.texts import embed_settings, text_rows

pytestmark = pytest.mark.usefixtures("home")

TEXTS = ["red old house", "a", "new cat " * 40, "The fox is brown."]


def fill(home: Path) -> None:
    for form in ("pairs", "triplets", "scores", "labels"):
        text_rows(home / f"{form}.jsonl", form)
    write_rows(home / "texts.jsonl", ({"text": text, "n": number} for number, text in enumerate(TEXTS)))


def command(home: Path, run: str, form: str = "pairs", model: str = "bert", **changes: object) -> list[str]:
    rows = home / f"{form}.jsonl"
    asked = embed_settings(model_folder(model), rows, **{"data__validation_split": 0.2, **changes})
    return ["train", *as_options(asked), "--output-dir", str(home / run)]


def made(home: Path, run: str, *more: Any, **changes: object) -> Path:
    if not (home / run / "final").exists():
        assert cli(command(home, run, *more, **changes)) == 0
    return home / run


def vectors(target: Path, home: Path, output: Path, *more: str) -> np.ndarray:
    asked = ["embed", str(target), "--data", str(home / "texts.jsonl"), "--output", str(output), "--precision", "fp32"]
    assert cli([*asked, *more]) == 0
    found: np.ndarray = np.load(output)
    return found


@pytest.mark.parametrize(("precision", "distance"), [("int16", 1e-4), ("int8", 0.005)])
def test_vectors_in_integers_are_close_to_those_in_fp32(
    home: Path, tmp_path: Path, precision: str, distance: float
) -> None:
    run = made(home, "bert2", "pairs", "bert")
    exact = vectors(run, home, tmp_path / "fp32.npy")
    rounded = vectors(run, home, tmp_path / "rounded.npy", "--precision", precision)
    assert not np.array_equal(rounded, exact)
    assert (rounded * exact).sum(axis=1) == pytest.approx(1.0, abs=distance)


def test_many_texts_are_embedded_in_int8_only_if_a_sample_agrees(
    home: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.load()
    if not library.multiplies_int8():
        pytest.skip("this processor does not multiply int8 faster")
    run = made(home, "bert2", "pairs", "bert")
    write_rows(home / "many.jsonl", ({"text": TEXTS[number % len(TEXTS)]} for number in range(LEAST_TEXTS)))
    monkeypatch.setattr("sansgpu.kernels.roofline.is_faster", lambda *_, **__: True)
    asked, answers = ["embed", str(run), "--data", str(home / "many.jsonl"), "--output"], {}
    for least in (0.5, 1.1):
        monkeypatch.setattr("sansgpu.jobs.embed.LEAST_COSINE", least)
        capsys.readouterr()
        assert cli([*asked, str(tmp_path / f"{least}.npy")]) == 0
        answers[least] = capsys.readouterr().out
    assert "512 vectors, computed in int8 (mean cosine similarity of int8 and " in answers[0.5]
    assert "512 vectors, computed in int8" not in answers[1.1]
    assert "512 vectors, computed in " in answers[1.1]


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        pytest.param("bert", {}, marks=pytest.mark.long),
        ("qwen2", {}),
        pytest.param("modernbert", {"model__pooling": "cls"}, marks=pytest.mark.long),
        ("bert", {"model__adapter": "lora"}),
    ],
)
def test_sentence_transformers_and_transformers_load_the_final_folder(
    home: Path, tmp_path: Path, model: str, changes: dict[str, object]
) -> None:
    run = made(home, f"{model}{len(str(changes))}", "pairs", model, **changes)
    theirs = SentenceTransformer(str(run / "final"), device="cpu")
    expected = theirs.encode(TEXTS)
    assert np.abs(np.linalg.norm(expected, axis=1) - 1).max() < 1e-5
    for number, target in enumerate((run, run / "final")):
        np.testing.assert_allclose(vectors(target, home, tmp_path / f"{number}.npy"), expected, atol=1e-5)
    with torch.no_grad():
        AutoModel.from_pretrained(run / "final")(torch.tensor([[5, 6, 7]]))
    assert "SentenceTransformer" in (run / "final/README.md").read_text(encoding="utf-8")


def test_of_an_encoder_with_a_decoder_only_the_encoder_embeds(home: Path, tmp_path: Path) -> None:
    model = make_architecture(tmp_path / "t5", "t5", "none", tokenizer_for("t5"))
    run = tmp_path / "run"
    assert cli([*command(home, "t5", model__name_or_path=model)[:-1], str(run)]) == 0
    expected = SentenceTransformer(str(run / "final"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(vectors(run / "final", home, tmp_path / "vectors.npy"), expected, atol=1e-5)
    assert not any("decoder" in name for name in load_weights(run / "final/model.safetensors"))


def test_a_sentence_transformers_folder_is_fine_tuned_as_it_is(home: Path, tmp_path: Path, capsys: Captured) -> None:
    base = made(home, "modernbert24", "pairs", "modernbert", model__pooling="cls") / "final"
    asked = command(home, "again", model__name_or_path=base)
    asked = [
        part for pair in zip(asked[1::2], asked[2::2], strict=True) if "max_length" not in pair[1] for part in pair
    ]
    assert cli(["train", *asked]) == 0
    settings = json.loads((home / "again/final/1_Pooling/config.json").read_text())
    assert settings["pooling_mode_cls_token"]
    assert not settings["pooling_mode_mean_tokens"]
    assert json.loads((home / "again/final/sentence_bert_config.json").read_text())["max_seq_length"] == 24
    capsys.readouterr()
    assert cli(["eval", str(home / "again/final"), "--data", str(home / "scores.jsonl"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert -1 <= found["spearman"] <= 1
    (tmp_path / "modules.json").write_text('[{"type": "sentence_transformers.models.CNN", "path": "2_CNN"}]')
    for file in base.iterdir():
        if file.is_file() and file.name != "modules.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert cli(["embed", str(tmp_path), "--data", "x.jsonl", "--output", str(tmp_path / "a.npy")]) == 2
    capsys.readouterr()
    assert cli(command(home, "cnn", model__name_or_path=tmp_path)) == 2
    assert "names the module CNN" in sentence(capsys)


def test_prompts_of_sentence_transformers_precede_texts(home: Path, tmp_path: Path, capsys: Captured) -> None:
    """Prompts are chosen by name or by default, as in Sentence Transformers; queries and documents have their own."""
    folder, texts = tmp_path / "model", tmp_path / "texts"
    shutil.copytree(made(home, "measured-pairs", "pairs") / "final", folder)
    settings = folder / "config_sentence_transformers.json"
    prompts = {"query": "old house: ", "document": "red fox: ", "other": "new: "}
    settings.write_text(json.dumps({"prompts": prompts, "default_prompt_name": "other"}))
    theirs = SentenceTransformer(str(folder), device="cpu")
    for number, more in enumerate(([], ["--prompt", "query"])):
        expected = theirs.encode(TEXTS, prompt_name=more[-1] if more else None)
        np.testing.assert_allclose(vectors(folder, home, tmp_path / f"{number}.npy", *more), expected, atol=1e-5)
    texts.mkdir()
    (texts / "a.txt").write_text(TEXTS[3])
    capsys.readouterr()
    assert cli(["search", str(folder), str(texts), TEXTS[0], "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["passages"]
    assert found["score"] == pytest.approx(theirs.encode_query(TEXTS[0]) @ theirs.encode_document(TEXTS[3]), abs=0.02)
    tuned = made(home, "with-prompts", model__name_or_path=folder, training__max_steps=1)
    written = json.loads((tuned / "final/config_sentence_transformers.json").read_text())
    assert (written["prompts"], written["default_prompt_name"]) == (prompts, "other")


def with_dense(base: Path, folder: Path) -> Path:
    """Copies a model with two Dense modules before the normalization, and with a dot product as its similarity."""
    transformer = Transformer(str(base))
    torch.manual_seed(3)
    layers = [
        Dense(transformer.get_embedding_dimension(), 48, activation_function=torch.nn.Tanh()),
        Dense(48, 24, bias=False, activation_function=torch.nn.Identity()),
    ]
    pooling = Pooling(transformer.get_embedding_dimension())
    model = SentenceTransformer(modules=[transformer, pooling, *layers], device="cpu", similarity_fn_name="dot")
    model.prompts = {"query": "old house: ", "document": "red fox: "}
    model.save(str(folder))
    return folder


def test_dense_modules_are_trained_and_the_dot_product_is_kept(home: Path, tmp_path: Path, capsys: Captured) -> None:
    folder = with_dense(made(home, "measured-pairs", "pairs") / "final", tmp_path / "model")
    theirs = SentenceTransformer(str(folder), device="cpu")
    np.testing.assert_allclose(vectors(folder, home, tmp_path / "a.npy"), theirs.encode(TEXTS), atol=1e-5)
    (home / "few.txt").write_text(f"{TEXTS[0]}\n\n{TEXTS[3]}\n")
    capsys.readouterr()
    assert cli(["search", str(folder), str(home / "few.txt"), TEXTS[3], "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["passages"]
    text = f"{TEXTS[0]}\n\n{TEXTS[3]}"
    assert found["score"] == pytest.approx(theirs.encode_query(TEXTS[3]) @ theirs.encode_document(text), rel=0.02)
    run = made(home, "with-dense", model__name_or_path=folder, training__learning_rate=0.01)
    settings = json.loads((run / "final/config_sentence_transformers.json").read_text())
    assert settings["similarity_fn_name"] == "dot"
    trained = SentenceTransformer(str(run / "final"), device="cpu")
    assert trained.similarity_fn_name == "dot"
    for before, after in zip([*theirs][2:], [*trained][2:], strict=True):
        assert float((before.linear.weight - after.linear.weight).detach().abs().max()) > 1e-4
        assert repr(before.activation_function) == repr(after.activation_function)
    for number, target in enumerate((run, run / "final")):
        found_vectors = vectors(target, home, tmp_path / f"trained{number}.npy")
        np.testing.assert_allclose(found_vectors, trained.encode(TEXTS), atol=1e-5)
    assert "sentence_dense" not in "".join(load_weights(run / "final/model.safetensors"))
    assert {"2_Dense", "3_Dense"} <= {path.name for path in (run / "final").iterdir()}


PROMPTS: list[tuple[Any, str, str]] = [
    ("auto", "old house: ", "red fox: "),
    ("none", "", ""),
    ({"query": "new cat: ", "document": "a "}, "new cat: ", "a "),
    ({"query": "new cat: "}, "new cat: ", "red fox: "),
]


@pytest.mark.parametrize(("asked", "query", "passage"), PROMPTS, ids=range(len(PROMPTS)))
def test_prompts_precede_the_texts_of_pairs(home: Path, tmp_path: Path, asked: Any, query: str, passage: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(made(home, "measured-pairs", "pairs") / "final", folder)
    own = {"prompts": {"query": "old house: ", "passage": "red fox: "}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(own))
    changes = {"data__validation_split": 0.2, "data__prompts": asked}
    config, _ = load_config(None, embed_settings(folder, home / "pairs.jsonl", **changes))
    config, corpus = TextEmbedding.prepare(config, tmp_path, lambda *_: None)
    batch = corpus.train.batch(np.arange(4))
    found = [text.tolist() for text in batch.tokens.split(batch.lengths.tolist())]
    rows = [json.loads(line) for line in (home / "pairs.jsonl").read_text().splitlines()]
    for number, kind in enumerate(("anchor", "positive")):
        prompt = (query, passage)[number]
        given = [corpus.tokenizer(prompt + row[kind], truncation=True, max_length=24).input_ids for row in rows]
        assert all(text in given for text in found[number::2])
    assert any("before anchors" in note for note in corpus.notes) == bool(query)
    layout = TextEmbedding(config, corpus, 2).objective.layout
    assert (layout.query_prompt, layout.passage_prompt) == (query, passage)


def test_unknown_prompts_are_refused(home: Path, capsys: Captured) -> None:
    assert cli(command(home, "bad", data__prompts={"passage": "a"})) == 2
    assert "it has passage, but can have query and document; correct it" in sentence(capsys)


def test_prompts_that_cannot_be_used_are_refused(home: Path, tmp_path: Path, capsys: Captured) -> None:
    folder, output = tmp_path / "model", str(tmp_path / "a.npy")
    shutil.copytree(made(home, "measured-pairs", "pairs") / "final", folder)
    asked = ["embed", str(folder), "--data", str(home / "texts.jsonl"), "--output", output]
    pooling = json.loads((folder / "1_Pooling/config.json").read_text()) | {"include_prompt": False}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    for settings, said in (
        ({"prompts": {"query": "Q: "}}, "excludes prompts from pooling"),
        ({"default_prompt_name": "query"}, ": the default prompt query is missing; add it to prompts."),
        ({"prompts": ["query"]}, ": prompts is not an object with strings; fix or remove it."),
        ({"prompts": {"query": ""}}, "has no prompt passage; its prompts are query."),
    ):
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
        capsys.readouterr()
        assert cli([*asked, "--prompt", "passage"]) == 2
        assert said in sentence(capsys)


@pytest.mark.parametrize(("form", "metric"), [("pairs", "mrr"), ("labels", "ndcg_at_10"), ("scores", "spearman")])
def test_metrics(home: Path, form: str, metric: str, capsys: Captured) -> None:
    run = made(home, f"measured-{form}", form)
    last = events_of(run, "eval")[-1]
    assert 0 <= abs(last[metric]) <= 1
    capsys.readouterr()
    assert cli(["eval", str(run), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again[metric] == pytest.approx(last[metric], abs=1e-6)
    assert again["loss"] == pytest.approx(last["loss"], abs=1e-5)


def test_vectors_keep_the_columns_of_their_rows(home: Path, tmp_path: Path) -> None:
    run = made(home, "measured-pairs", "pairs")
    expected = vectors(run, home, tmp_path / "a.npy")
    assert cli(["embed", str(run), "--data", str(home / "texts.jsonl"), "--output", str(tmp_path / "a.parquet")]) == 0
    table = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    assert table.column_names == ["text", "n", "embedding"]
    assert table["text"].to_pylist() == TEXTS
    np.testing.assert_allclose(np.array(table["embedding"].to_pylist()), expected, atol=0.02)  # bf16 on some CPUs
    assert expected.dtype == np.float32


def test_vectors_are_written_as_a_whole_or_not_at_all(home: Path, tmp_path: Path, capsys: Captured) -> None:
    run, output = made(home, "measured-pairs", "pairs"), tmp_path / "a.npy"
    rows = tmp_path / "rows.jsonl"
    for text, problem in (
        ('" "', "line 2: its text is empty"),
        ("3", "line 2: column text contains a value of type int"),
    ):
        rows.write_text('{"text": "red"}\n{"text": ' + text + "}\n")
        capsys.readouterr()
        assert cli(["embed", str(run), "--data", str(rows), "--output", str(output)]) == 2
        assert problem in sentence(capsys)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]
    assert cli(["embed", str(run), "--data", str(rows), "--output", str(tmp_path / "a.txt")]) == 2
    assert "has an unsupported format; choose a name that ends in .npy or .parquet" in sentence(capsys)
    rows.write_text('{"title": "red", "body": "old"}\n')
    assert cli(["embed", str(run), "--data", str(rows), "--output", str(output)]) == 2
    assert "set --text-column" in sentence(capsys)


BAD = {
    '{"anchor": "red", "positive": " "}': "line 2: its positive is empty",
    '{"anchor": "red"}': "line 2: it has no positive",
    '{"anchor": "red", "positive": "old", "negative": ["new", 3]}': "its negative contains 3, which is not text",
    '{"text1": "red", "text2": "old"}': "line 2: it has no score",
    '{"text1": "red", "text2": "old", "score": "high"}': "line 2: its score is 'high' instead of a finite number",
    '{"text1": "red", "text2": "old", "score": 1}': "two texts and a score, but the rows before it have an anchor",
    '{"text": "red"}': "line 2: it has no label",
    '{"title": "red"}': "line 2 has the columns title; rows need anchor and positive",
    "3": "line 2: it is of type int instead of an object with texts",
}


@pytest.mark.parametrize("row", BAD)
def test_a_bad_row_is_one_sentence(home: Path, tmp_path: Path, row: str, capsys: Captured) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"anchor": "red", "positive": "old"}\n' + row + "\n")
    assert cli(command(home, "bad", data__dataset_name=rows)) == 2
    assert BAD[row] in sentence(capsys)


def test_data_that_cannot_be_learned_from(home: Path, tmp_path: Path, capsys: Captured) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "red", "label": "a"}\n{"text": "old", "label": "a"}\n')
    assert cli(command(home, "bad", data__dataset_name=rows, data__validation_name=rows)) == 2
    assert "every row has the label a" in sentence(capsys)
    assert cli(command(home, "bad", training__embedding_loss="triplet")) == 2
    assert "line 1: it has no negative" in sentence(capsys)
    assert cli(command(home, "bad", training__embedding_loss="cosine")) == 2
    assert "does not support the rows, which have an anchor and a positive" in sentence(capsys)
    assert cli(command(home, "bad", training__matryoshka_dims=[65])) == 2
    assert "have only 64 dimensions" in sentence(capsys)
    assert cli(command(home, "bad", "scores", data__score_scale=2)) == 2
    assert "is not between 0 and data.score_scale 2" in sentence(capsys)


def test_a_graph_encoder_of_our_own_layout_is_refused_with_what_to_train(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "sansgpu-graph"}))
    assert cli(["embed", str(tmp_path), "--data", "x.jsonl", "--output", str(tmp_path / "a.npy")]) == 2
    assert "train a plain BERT instead, with model.leaves 0, model.decay none" in sentence(capsys)
