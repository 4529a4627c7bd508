"""`bench` refuses wrong options, projects requested numbers of steps, and bases advice on validation metrics."""

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from sansgpu.cli import run as cli
from sansgpu.config import Config, ConfigError, TrainingConfig
from sansgpu.planning.forecast import Forecast, projections, start_time, target_steps
from sansgpu.planning.results import Variation
from sansgpu.planning.suggestions import HARMLESS_COSTS, affordable, asked_changes, built_in_changes, learning_advice
from sansgpu.views.bench import speedup_text

NEAR = {"mlm_acc": 0.05, "mlm_majority_acc": 0.05, "mrr": 0.033, "relation_frequency_mrr": 0.03, "queries": 100.0}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--targets", "0"], "write numbers of steps"),
        (["--targets", "500,many"], "write numbers of steps"),
        (["--start", "25:00"], "--start 25:00 is not a time"),
        (["--start", "2020-01-31T18:00"], "which is in the past"),
        (["--vary", "model.n_layers"], "--vary model.n_layers has no values"),
        (["--vary", "model.n_layers=4,,8"], "has no values"),
        (["--vary", "model.n_layrs=4"], "n_layers"),
        (["--vary", "model.n_layers=0"], "--vary model.n_layers=0: model.n_layers"),
        (["--vary", "data.vocab_size=500"], "measurements use random tokens"),
        (["--vary", "training.batch_size=4,auto"], "requires numbers"),
        (["--vary", "model.n_layers=2", "--forward-only"], "remove --forward-only"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["bench", "--output-dir", str(tmp_path / "bench"), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_every_requested_value_is_a_variation_with_its_cost() -> None:
    config = Config.model_validate({"model": {"vocab_size": 500}})
    asked = ["model.n_layers=2, 4", "training.threads=1", "training.batch_size=2", "training.learning_rate=0.1"]
    changes = asked_changes(config, asked)
    assert [settings for _, settings, _ in changes] == [
        ("model.n_layers=2",), ("model.n_layers=4",), ("training.threads=1",), ("training.batch_size=2",),
        ("training.learning_rate=0.1",),
    ]  # fmt: skip
    tokens = 2 * config.training.gradient_accumulation_steps * config.window
    assert [cost for _, _, cost in changes] == [
        "parameters", "parameters", "nothing", f"{tokens:,} tokens per step", "changes the training",
    ]  # fmt: skip


def test_projections_count_from_the_start() -> None:
    training = TrainingConfig(eval_steps=0, save_steps=0)
    cold, warm = Forecast(60, 1, 0, 0, 0), Forecast(0, 1, 0, 0, 0)
    start = datetime(2040, 1, 31, 18, 0)
    rows = projections(target_steps("500,5000"), 1000, cold, warm, training, start)
    assert [row["steps"] for row in rows] == [500, 5000]
    assert rows[0]["done"] == (start + timedelta(seconds=560)).isoformat(timespec="minutes")
    assert "done_from_snapshot" not in rows[0]
    assert rows[1]["done_from_snapshot"] == (start + timedelta(seconds=4000)).isoformat(timespec="minutes")
    assert 0 < (start_time("18:00") - datetime.now()).total_seconds() <= 24 * 3600
    for evening in ("6PM", "6 pm", "06:00PM"):
        assert start_time(evening) == start_time("18:00")
    assert start_time("12:30am") == start_time("0:30")
    with pytest.raises(ConfigError, match="noon is not a time; write 18:00, 6PM or"):
        start_time("noon")


def test_metrics_near_their_baseline_give_advice_that_acts() -> None:
    graph = {"task": "graph", "model": {"n_entities": 10}, "data": {"dataset_name": "triples.tsv"}}
    config = Config.model_validate(graph)
    first, ranks, tokens = learning_advice(config, NEAR, 20)
    assert "--steps 200" in first
    assert "masked token accuracy 5.0% is no better" in tokens
    assert "training.mlm_weight=2" in tokens
    assert "MRR 0.033 is little better than the baseline without a model (ranked by frequency: 0.030)" in ranks
    assert f"data.kge_triples={2 * config.data.kge_triples}" in ranks
    config = Config.model_validate({**graph, "model": {"n_entities": 0}})
    assert "data.kge_triples" not in learning_advice(config, NEAR, 20)[1]
    assert learning_advice(config, {**NEAR, "mlm_acc": 0.3, "mrr": 0.4}, 20) == []


def test_usual_variations_are_measured_only_as_far_as_they_are_quick() -> None:
    settings = {"batch_size": 4, "gradient_accumulation_steps": 4, "threads": 2, "precision": "fp32"}
    changes = built_in_changes(Config.model_validate({"model": {"vocab_size": 500}, "training": settings}))
    assert affordable(changes, seconds=1.0) == changes
    harmless, *_ = affordable(changes, seconds=100.0)
    assert affordable(changes, seconds=100.0) == [harmless]
    assert harmless[2] in HARMLESS_COSTS
    assert affordable(changes, seconds=1000.0) == []


def test_a_speedup_within_the_noise_of_its_steps_is_not_claimed() -> None:
    row: Variation = {
        "name": "half the layers",
        "set": [],
        "gives_up": "half of them",
        "speedup": 0.61,
        "speedup_range": [0.4, 1.1],
        "all_step_seconds": [1.0, 2.0],
    }
    assert speedup_text(row) == "no measurable difference (0.40x to 1.10x in 2 steps)"
    assert speedup_text({**row, "speedup_range": [0.5, 0.7]}) == "0.61x (0.50x to 0.70x in 2 steps)"
