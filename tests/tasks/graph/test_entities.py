"""Runs on knowledge graphs: entities are ranked, leaf slots are chosen from the data, and killed runs are resumed."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from benchmarks.graph.small_graph import CONFIG, facts, write_graph

from sansgpu.cli import run as cli
from tests.processes import (
    Captured,
    digests,
    events_of,
    finish,
    json_of,
    kill_when,
    options,
    refused,
    start,
    train_once,
)
from tests.tasks.graph.entities import FACTS, corpus_of, settings, write_facts


def fill(home: Path) -> None:
    write_facts(home)


def trained(home: Path, name: str, **changes: object) -> Path:
    return train_once(home / name, settings(home, **changes))


def config_of(run: Path) -> dict[str, Any]:
    value: dict[str, Any] = yaml.safe_load((run / "config.yaml").read_text())
    return value


@pytest.fixture(scope="module")
def learned(home: Path) -> Path:
    steps = {"training__max_steps": 200, "training__eval_steps": 100, "training__save_steps": 200}
    return trained(home, "learned", model__d_model=64, model__d_ff=128, training__batch_size=32, **steps)


@pytest.mark.long
def test_tails_of_a_small_graph_are_ranked_far_above_the_baselines(learned: Path, capsys: Captured) -> None:
    tail = json_of(capsys, "eval", str(learned), "--link-prediction")["tail"]
    assert (tail["covered"], tail["trained_on"]) == (1, 0)
    assert tail["mrr"] > max(tail["relation_frequency_mrr"], tail["random_mrr"]) + 0.1
    assert tail["mrr"] > 0.8


def test_validation_ranks_the_validation_split_as_link_prediction_does(
    home: Path, learned: Path, capsys: Captured
) -> None:
    first, last = events_of(learned, "eval")
    held = Path(shutil.copytree(home / "graph", home / "without-test", ignore=shutil.ignore_patterns("test.tsv")))
    asked = ("--link-prediction", "--data", str(held), "--limit", "128")
    ranked = json_of(capsys, "eval", str(learned), *asked)["tail"]
    own = json_of(capsys, "eval", str(learned))
    for name in ("mrr", "hits_at_1", "relation_frequency_mrr", "queries"):
        assert own[name] == pytest.approx(last[name], abs=1e-4)
        assert ranked[name] == pytest.approx(last[name], abs=1e-4)
    assert last["queries"] == min(128, len((held / "dev.tsv").read_text().splitlines()))
    assert last["mrr"] > max(first["mrr"], last["relation_frequency_mrr"])
    assert last["mrr"] > 2 * last["entity_acc"], "unfiltered accuracy counts other true tails as errors"
    assert cli(["eval", str(learned)]) == 0
    said = capsys.readouterr().out
    assert f"filtered MRR {last['mrr']:.3f} of {last['queries']:.0f} tails of the validation split (Hits@1 " in said
    assert "unfiltered entity queries correct" in said


@pytest.mark.parametrize("table", [{}, {"model__n_entities": 0}], ids=["entities", "spelled"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_heads_are_ranked_with_inverse_relations(home: Path, table: dict[str, int], precision: str) -> None:
    """In bf16 runs, evaluations during training use the model's bf16 weights."""
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
    ranked = [json_of(capsys, "eval", str(target), *asked)["tail"]["mrr"] for target in (learned, learned / "final")]
    assert ranked[0] == pytest.approx(ranked[1])
    head, relation, _ = (home / "graph" / "train.tsv").read_text().splitlines()[0].split("\t")
    true = {row[2] for row in FACTS if row[:2] == [head, relation]}
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
    tail = json_of(capsys, "eval", str(home / "long"), "--link-prediction")["tail"]
    assert tail["mrr"] >= 0.85
    assert tail["hits_at_10"] >= 0.97
    assert tail["mrr"] > tail["relation_frequency_mrr"] + 0.1


def test_leaf_slots_follow_the_tails_and_their_cost_is_reported(home: Path, capsys: Captured) -> None:
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
    assert "model.leaves 1 is too small for the tails of" in said
    assert "training triples" in said
    assert "data.long_tails to drop" in said
    assert not (home / "refused" / "snapshots").exists()
    assert cli([*line, str(home / "dropped"), "--set", "data.long_tails=drop"]) == 0
    assert "because the tail is too long" in "".join(capsys.readouterr())


def forget_configuration(run: Path) -> None:
    """Deletes the copies of a run's configuration in `.sansgpu.json` and in its snapshots."""
    (run / ".sansgpu.json").unlink()
    for snapshot in (run / "snapshots").glob("step-*"):
        state_file, manifest_file = snapshot / "state.json", snapshot / "MANIFEST.json"
        values = json.loads(state_file.read_text())
        del values["configuration"]
        state_file.write_text(json.dumps(values, indent=2) + "\n")
        manifest = json.loads(manifest_file.read_text())
        manifest["files"]["state.json"] = hashlib.sha256(state_file.read_bytes()).hexdigest()
        manifest_file.write_text(json.dumps(manifest, indent=2) + "\n")


def test_a_run_from_before_these_keys_continues_unchanged(home: Path) -> None:
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
    file = Path(__file__).parents[3] / "configs" / "graph_80m.yaml"
    shaped = {"task": "", "training__eval_steps": "", "training__save_steps": "", "model__leaves": "null"}
    line = settings(home, **shaped, training__warmup_steps=1)
    folder = home / "bench"
    asked = ["--vary", "model.n_layers=1,1000000", "--targets", "70,7", "--start", "2040-01-31T18:00"]
    measured = ["--steps", "2", "--no-what-if", *asked, "--output-dir", str(folder)]
    result = json_of(capsys, "bench", str(file), *line, *measured)
    assert result["tokens_per_second"] > 0
    names = ["unchanged", "model.n_layers=1", "model.n_layers=1000000"]
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


@pytest.mark.long
def test_a_killed_run_of_a_graph_continues_without_one_bit_of_difference(home: Path) -> None:
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
