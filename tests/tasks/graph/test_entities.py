"""Knowledge graphs: entity tables and queries, and leaf slots chosen from the data."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from benchmarks.small_graph import CONFIG, facts, write_graph

from sansgpu.cli import run as cli
from sansgpu.config import Config, load_config
from sansgpu.tasks.graph.batch import HEAD_ENTITY, QUERY_TAIL, RELATION, TAIL_START, add_entity_queries
from sansgpu.tasks.graph.data import GraphCorpus
from sansgpu.tasks.graph.masked_prediction import mask_rules
from sansgpu.tasks.graph.tail_prediction import EntityCandidates, EntityTableIndex, TailPredictor, TailQuery
from sansgpu.tasks.graph.task import Graph
from sansgpu.tasks.graph.triples import Entity
from tests.processes import digests, events_of, finish, kill_when, options, overrides, start, train_once

Captured = pytest.CaptureFixture[str]
TINY = {
    "task": "graph", "model.d_model": 32, "model.n_heads": 2, "model.n_layers": 2, "model.d_ff": 64,
    "model.max_seq_len": 24, "data.vocab_size": 400, "training.batch_size": 16,
    "training.gradient_accumulation_steps": 1, "training.max_steps": 2, "training.eval_steps": 2,
    "training.save_steps": 2, "training.logging_steps": 1, "training.precision": "fp32", "training.compile": "off",
    "training.report_to": "none", "training.threads": 1, "device": "cpu",
}  # fmt: skip
STILL = {"model__dropout": 0, "model__attention_dropout": 0, "model__relation_dropout": 0}


def fill(home: Path) -> None:
    write_graph(home / "graph", facts(entities=40, relations=8, block=25))


@pytest.fixture(autouse=True)
def _one_thread(home: Path) -> None:
    torch.set_num_threads(1)  # small models are slower with more; conftest restores it


def settings(home: Path, **changes: object) -> list[str]:
    return options(TINY, {"data.dataset_name": home / "graph"}, changes)


def trained(home: Path, name: str, **changes: object) -> Path:
    return train_once(home / name, settings(home, **changes))


def printed(capsys: Captured, *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert cli([*arguments, "--json"]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def refused(capsys: Captured, *arguments: str) -> str:
    capsys.readouterr()
    assert cli(list(arguments)) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-1]


def config_of(run: Path) -> dict[str, Any]:
    value: dict[str, Any] = yaml.safe_load((run / "config.yaml").read_text())
    return value


def corpus_of(home: Path, **changes: object) -> tuple[Config, GraphCorpus]:
    config, _ = load_config(None, overrides(TINY, {"data.dataset_name": home / "graph"}, changes))
    return Graph.prepare(config, home / "cache", lambda *_: None)


@pytest.fixture(scope="module")
def learned(home: Path) -> Path:
    torch.set_num_threads(1)
    steps = {"training__max_steps": 300, "training__eval_steps": 150, "training__save_steps": 300}
    return trained(home, "learned", model__d_model=64, model__d_ff=128, training__batch_size=32, **steps)


def test_tails_of_a_small_graph_are_ranked_far_above_the_baselines(learned: Path, capsys: Captured) -> None:
    tail = printed(capsys, "eval", str(learned), "--link-prediction")["tail"]
    assert (tail["covered"], tail["trained_on"]) == (1, 0)
    assert tail["mrr"] > max(tail["relation_frequency_mrr"], tail["random_mrr"]) + 0.1
    assert tail["mrr"] > 0.8


def test_validation_ranks_the_validation_split_as_link_prediction_does(
    home: Path, learned: Path, capsys: Captured
) -> None:
    first, last = events_of(learned, "eval")
    held = Path(shutil.copytree(home / "graph", home / "without-test", ignore=shutil.ignore_patterns("test.tsv")))
    asked = ("--link-prediction", "--data", str(held), "--limit", "128")
    ranked = printed(capsys, "eval", str(learned), *asked)["tail"]
    own = printed(capsys, "eval", str(learned))
    for name in ("mrr", "hits_at_1", "relation_frequency_mrr", "queries"):
        assert own[name] == pytest.approx(last[name], abs=1e-4)
        assert ranked[name] == pytest.approx(last[name], abs=1e-4)
    assert last["queries"] == min(128, len((held / "dev.tsv").read_text().splitlines()))
    assert last["mrr"] > max(first["mrr"], last["relation_frequency_mrr"])
    assert last["mrr"] > 2 * last["entity_acc"], "unfiltered accuracy is low where heads have several tails"
    assert cli(["eval", str(learned)]) == 0
    said = capsys.readouterr().out
    assert f"filtered MRR {last['mrr']:.3f} of {last['queries']:.0f} tails of the validation split (Hits@1 " in said
    assert "unfiltered entity queries correct" in said


@pytest.mark.parametrize("table", [{}, {"model__n_entities": 0}], ids=["entities", "spelled"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_heads_are_ranked_with_inverse_relations(home: Path, table: dict[str, int], precision: str) -> None:
    """In bf16 the weights of the model in training are narrow, and those that `eval` reads from a snapshot are not."""
    changes = {"data__inverse_relations": True, "training__precision": precision, **table}
    run = trained(home, f"inverse-{precision}-{len(table)}", **changes)
    (last,) = events_of(run, "eval")
    for side in ("", "head_"):
        assert 0 < last[f"{side}mrr"] < 1
        assert 0 <= last[f"{side}hits_at_1"] < last[f"{side}mrr"]
        assert 0 < last[f"{side}queries"] <= (32 if table else 128)
        assert f"{side}relation_frequency_mrr" in last


def test_an_exported_folder_ranks_as_its_run_and_chooses_among_entities(
    home: Path, learned: Path, capsys: Captured
) -> None:
    asked = ("--link-prediction", "--data", str(home / "graph"), "--limit", "40")
    ranked = [printed(capsys, "eval", str(target), *asked)["tail"]["mrr"] for target in (learned, learned / "final")]
    assert ranked[0] == pytest.approx(ranked[1])
    head, relation, _ = (home / "graph" / "train.tsv").read_text().splitlines()[0].split("\t")
    true = {row[2] for row in facts(entities=40, relations=8, block=25) if row[:2] == [head, relation]}
    capsys.readouterr()
    chosen = ["--head", head, "--relation", relation, "--closed", "--top", "2"]
    assert cli(["extract", str(learned), "--text", head, *chosen]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 2
    assert found[0]["tail"] in true
    assert found[0]["score"] > found[1]["score"]


@pytest.mark.long
def test_a_graph_of_135_entities_is_learned_in_minutes(home: Path, capsys: Captured) -> None:
    graph = write_graph(home / "whole", facts())
    changes = options({"data.dataset_name": graph, "training.report_to": "none"})
    assert cli(["train", str(CONFIG), *changes, "--output-dir", str(home / "long")]) == 0
    tail = printed(capsys, "eval", str(home / "long"), "--link-prediction")["tail"]
    assert tail["mrr"] >= 0.85
    assert tail["hits_at_10"] >= 0.97
    assert tail["mrr"] > tail["relation_frequency_mrr"] + 0.1


def test_leaf_slots_follow_the_tails_and_the_cost_is_told(home: Path, capsys: Captured) -> None:
    run = trained(home, "fitted")
    model, said = config_of(run)["model"], "".join(capsys.readouterr())
    config, corpus = corpus_of(home)
    tails = [t for d in (home / "graph" / "train.tsv").read_text().splitlines() for t in [d.split("\t")[2]]]
    lengths = np.array([len(ids) for ids in corpus.codec.tokenizer.encode_names(tails)])
    assert model["leaves"] == config.model.leaves
    assert (lengths <= model["leaves"]).mean() >= 0.99 > (lengths <= model["leaves"] - 1).mean()
    assert f"model.leaves is {model['leaves']}, enough for " in said
    assert f"{lengths.mean():.1f} nodes" in said
    assert (
        model["n_entities"]
        == len(corpus.codec.entities)
        == len(json.loads((run / "tokenizer/entities.json").read_text()))
    )


def test_long_tails_are_left_out_by_consent_alone(home: Path, capsys: Captured) -> None:
    line = ["train", *settings(home, model__leaves=1), "--output-dir"]
    said = refused(capsys, *line, str(home / "refused"))
    assert "model.leaves 1 has too few slots for the tails of" in said
    assert "training triples" in said
    assert "data.long_tails to drop" in said
    assert not (home / "refused" / "snapshots").exists()
    assert cli([*line, str(home / "dropped"), "--set", "data.long_tails=drop"]) == 0
    assert "because the tail is too long" in "".join(capsys.readouterr())


def forget_configuration(run: Path) -> None:
    """Removes what the mark and the snapshots of a run record of its configuration."""
    (run / ".sansgpu.json").unlink()
    for snapshot in (run / "snapshots").glob("step-*"):
        state_file, manifest_file = snapshot / "state.json", snapshot / "MANIFEST.json"
        values = json.loads(state_file.read_text())
        del values["configuration"]
        state_file.write_text(json.dumps(values, indent=2) + "\n")
        manifest = json.loads(manifest_file.read_text())
        manifest["files"]["state.json"] = hashlib.sha256(state_file.read_bytes()).hexdigest()
        manifest_file.write_text(json.dumps(manifest, indent=2) + "\n")


def test_a_run_from_before_these_keys_goes_on_as_it_was(home: Path) -> None:
    old = {"model__leaves": 2, "model__n_entities": 0, "data__long_tails": "drop"}
    run = trained(home, "old", **old)
    values = config_of(run)
    for section, keys in {
        "model": ("n_entities", "entity_rank"),
        "training": ("entity_weight",),
        "data": ("long_tails", "entity_query_ratio"),
    }.items():
        for key in keys:
            del values[section][key]
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    forget_configuration(run)
    assert cli(["eval", str(run)]) == 0
    assert cli(["train", "--output-dir", str(run), "--resume", "--set", "training.max_steps=4"]) == 0
    whole = trained(home, "old-whole", **old, training__max_steps=4)
    final = [d[name] for d in (digests(run), digests(whole)) for name in d if name == "final/model.safetensors"]
    assert len(final) == 2
    assert final[0] == final[1]


@pytest.mark.long
def test_bench_measures_a_configuration_whose_shape_is_the_datas(home: Path, capsys: Captured) -> None:
    file = Path(__file__).parents[2] / "configs" / "graph_80m.yaml"
    shaped = {"task": "", "training__eval_steps": "", "training__save_steps": "", "model__leaves": "null"}
    line = settings(home, **shaped, training__warmup_steps=1)
    folder = home / "bench"
    asked = ["--vary", "model.n_layers=1,1000000", "--targets", "70,7", "--start", "2040-01-31T18:00"]
    measured = ["--steps", "2", "--no-what-if", *asked, "--output-dir", str(folder)]
    result = printed(capsys, "bench", str(file), *line, *measured)
    assert result["tokens_per_second"] > 0
    names = ["as it is", "model.n_layers=1", "model.n_layers=1000000"]
    assert [row["name"] for row in result["what_if"]] == names
    assert "GB of memory, but" in result["what_if"][2]["problem"]
    assert result["what_if"][1]["gives_up"].endswith("fewer parameters")
    assert [(row["steps"], row["done"][:13]) for row in result["projections"]] == [
        (7, "2040-01-31T18"), (70, "2040-01-31T18"),
    ]  # fmt: skip
    validation = result["validation"]
    assert validation["queries"] == len((home / "graph" / "dev.tsv").read_text().splitlines())
    assert 0 < validation["mrr"] < 1
    assert {"mlm_majority_acc", "mnm_acc", "entity_acc", "relation_frequency_mrr"} <= validation.keys()
    report = (folder / "report.md").read_text()
    assert f"MRR {validation['mrr']:.3f} of" in report
    assert "masked tokens correct" in report
    assert all(text in report for text in result["advice"])
    model = config_of_file(folder / "optimized.yaml")["model"]
    assert model["vocab_size"] >= 300
    lines = [line.split("\t") for line in (home / "graph" / "train.tsv").read_text().splitlines()]
    ends = {name for head, _, tail in lines for name in (head, tail)}
    assert (model["n_relations"], model["n_entities"]) == (8, len(ends))


def config_of_file(file: Path) -> dict[str, Any]:
    value: dict[str, Any] = yaml.safe_load(file.read_text())
    return value


def test_a_killed_run_of_a_graph_goes_on_without_one_bit_of_difference(home: Path) -> None:
    line = ["train", *settings(home, training__max_steps=8), "--output-dir"]
    whole, killed = home / "whole-run", home / "killed"
    code, _, error = finish([*line, str(whole)], home / "cache")
    assert code == 0, error
    process = start([*line, str(killed)], home / "cache")
    assert kill_when(process, (killed / "snapshots/step-000002/MANIFEST.json").exists) == -9
    code, _, error = finish([*line, str(killed), "--resume"], home / "cache")
    assert code == 0, error
    kept = [{k: v for k, v in digests(run).items() if k.startswith("final")} for run in (whole, killed)]
    assert kept[0]
    assert kept[0] == kept[1]


def test_a_query_shows_one_masked_leaf_whatever_the_tail(home: Path) -> None:
    config, corpus = corpus_of(home, data__entity_query_ratio=1)
    rules = mask_rules(config, corpus.codec.tokenizer)
    shown = [
        add_entity_queries(corpus.train.example(number), rules, 0, 0, number) for number in range(len(corpus.train))
    ]
    placed = [p for example in shown for p in example.placed]
    assert {tuple(p.tail) for p in placed} == {(rules.mask_id,)}
    assert len({len(p.tail) for example in corpus.train.examples for p in example[1]}) > 1
    names = [corpus.codec.entities[p.entities[1] - 1].name for p in placed]
    assert names == [p.triple.tail for p in placed]
    some = mask_rules(*_ratio(config, 0.5), corpus.codec.tokenizer)
    asked = [
        p.is_query for n in range(len(shown)) for p in add_entity_queries(corpus.train.example(n), some, 0, 1, n).placed
    ]
    assert 0.4 < np.mean(asked) < 0.6


def _ratio(config: Config, ratio: float) -> tuple[Config]:
    return (config.model_copy(update={"data": config.data.model_copy(update={"entity_query_ratio": ratio})}),)


def plain_vectors(task: Graph, corpus: GraphCorpus) -> torch.Tensor:
    """Vectors of all entities, (E, D) fp64: the mean of a name's tokens and the projected vector."""
    table, embedding = task.model.entities, task.model.embedding.weight.double()
    assert table is not None
    own = table.own.weight[1:].double() @ table.project.weight.double().T
    names = torch.stack([embedding[tokens].mean(0) for tokens in corpus.entity_names])
    return own[: len(names)] + names


def complex_tails(task: Graph, heads: torch.Tensor, relations: torch.Tensor) -> torch.Tensor:
    """The normalized ComplEx product of heads (M, D) and relations (M,), (M, D) fp64."""
    table = task.model.entities
    assert table is not None
    turned = [torch.complex(*x.chunk(2, dim=1)) for x in (heads, table.relation.weight[relations].double())]
    product = turned[0] * turned[1]
    tails = torch.cat((product.real, product.imag), dim=1)
    norm = table.tail_norm
    return torch.nn.functional.layer_norm(tails, tails.shape[1:], norm.weight.double(), norm.bias.double(), norm.eps)


def mean_loss(logits: torch.Tensor, numbers: torch.Tensor) -> float:
    """Mean cross-entropy; targets are entity ids 1, 2, ..."""
    return float(torch.nn.functional.cross_entropy(logits, numbers - 1))


@torch.no_grad()
def test_losses_over_entities_are_those_of_a_plain_softmax(home: Path) -> None:
    config, corpus = corpus_of(
        home, **STILL, data__mask_ratio=0, data__leaf_mask_ratio=0, data__entity_query_ratio=1, model__n_entities=40
    )
    task = Graph(config, corpus, 8)
    table = task.model.entities
    assert table is not None
    table.tail_norm.weight.uniform_(0.5, 2)
    table.tail_norm.bias.uniform_(-1, 1)
    batch = task.batch(0)
    assert (batch.queries, batch.fact_count, batch.target_count()) == (8, 8 * config.data.kge_triples, 40)
    triples, vectors = batch.placed_triples(), plain_vectors(task, corpus)
    known = triples[:, HEAD_ENTITY] > 0
    assert known.any()
    tails = complex_tails(task, vectors[(triples[:, HEAD_ENTITY] - 1).clamp(min=0)], triples[:, RELATION])
    predicted = (
        task.model.predicted(task.objective.states(batch)[triples[:, TAIL_START]]).double() + tails * known[:, None]
    )
    of_queries = mean_loss(predicted @ vectors.T, triples[:, QUERY_TAIL])
    head, relation, tail = batch.facts.flatten(0, 1).T
    of_facts = mean_loss(complex_tails(task, vectors[head - 1], relation) @ vectors.T, tail)
    loss = float(task.loss(batch)) / batch.target_count()
    assert loss == pytest.approx(of_queries + of_facts, rel=1e-4)
    metrics = task.step_metrics(task.step_sums())
    assert (metrics["entity_loss"], metrics["kge_loss"]) == (
        pytest.approx(of_queries, rel=1e-4),
        pytest.approx(of_facts, rel=1e-4),
    )


def test_facts_are_training_triples_and_differ_from_epoch_to_epoch(home: Path) -> None:
    config, corpus = corpus_of(home, data__kge_triples=3)
    task = Graph(config, corpus, len(corpus.train))
    names = [entity.name for entity in corpus.codec.entities]
    lines = [line.split("\t") for line in (home / "graph" / "train.tsv").read_text().splitlines()]
    trained = {(head, relation.replace("_", " "), tail) for head, relation, tail in lines}
    epochs = [task.batch(step).facts for step in (0, 1)]
    for facts_drawn in epochs:
        assert facts_drawn.shape == (len(corpus.train), 3, 3)
        said = {
            (names[h - 1], corpus.codec.relations[r - 1], names[t - 1])
            for h, r, t in facts_drawn.flatten(0, 1).tolist()
        }
        assert said <= trained
        assert len(said) > 0.8 * len(trained)
    assert not torch.equal(*epochs)
    assert not any(batch.fact_count for batch in task.evaluator.validation_batches(8))


def test_one_batch_of_queries_in_pieces_gives_one_gradient(home: Path) -> None:
    config, corpus = corpus_of(home, **STILL, data__leaf_mask_ratio=0.9, training__entity_weight=0.7)
    gradients = []
    for size, ranks in ((12, 1), (5, 1), (1, 1), (2, 3)):
        task = Graph(config, corpus, 12)
        batch = task.batch(0)
        for rank in range(ranks):
            for piece in batch.micro_batches(size, rank, ranks):
                (task.loss(piece) / batch.target_count()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in task.model.parameters() if p.grad is not None]))
    for other in gradients[1:]:
        assert float((other - gradients[0]).norm() / gradients[0].norm()) < 1e-5


def test_unknown_entities_are_known_by_their_names_and_equal_ones_share_a_score(home: Path) -> None:
    config, corpus = corpus_of(home, **STILL)
    task, codec = Graph(config, corpus, 8), corpus.codec
    task.model.eval()
    predictor = TailPredictor(task.objective, codec.tokenizer.mask_id, torch.device("cpu"))
    index = EntityTableIndex(codec.entities)
    known = codec.entities[3]
    asked = [known, Entity("x1", "unheard thing"), Entity("x2", "unheard thing"), Entity("x3", known.name)]
    candidates = EntityCandidates(predictor, codec.tokenizer, index, asked)
    example = corpus.train.example(0)
    placed = example.placed[0]
    question = TailQuery(example.tokens, placed.root, placed.head_length, placed.relation, placed.entities[0])
    scores = candidates.scores(predictor, [question])[0][candidates.column].numpy()
    assert candidates.column.tolist() == [0, 1, 1, 0]  # an unknown id is found by its name if that is unique
    assert np.exp(scores[:2]).sum() == pytest.approx(1, abs=1e-5)
    tails = candidates.best(candidates.scores(predictor, [question])[0].numpy(), 5, without=known.name)
    assert [tail.text for tail in tails] == ["unheard thing"]
