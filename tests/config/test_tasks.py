"""Each task has its own defaults and accepts only the keys that affect it."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from sansgpu.config import Config, ConfigError, TrainingConfig
from sansgpu.config.load import save_config
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.graph.settings import max_span

SFT = {"task": "sft", "model": {"name_or_path": "m"}, "data": {"dataset_name": "rows.jsonl"}}


def refusal(tmp_path: Path, **changes: object) -> str:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**SFT, **changes}))
    with pytest.raises(ConfigError) as error:
        load_config(path)
    return str(error.value)


def test_fine_tuning_has_defaults_of_its_own() -> None:
    whole, adapted = (
        Config.model_validate({**SFT, "model": {"name_or_path": "m", "adapter": a}}) for a in ("none", "lora")
    )
    assert whole.training.learning_rate == 2e-5
    assert adapted.training.learning_rate == 5e-4
    assert whole.training.optimizer == "adamw"
    assert whole.training.window_warmup_ratio == 0
    assert whole.window == 1024
    assert Config.model_validate({**SFT, "training": {"learning_rate": 1e-3}}).training.learning_rate == 1e-3
    assert Config.model_validate({**SFT, "training": TrainingConfig(max_steps=3)}).training.learning_rate == 2e-5
    assert Config().training.learning_rate == TrainingConfig().learning_rate


def test_keys_that_do_nothing_in_a_task_are_refused(tmp_path: Path) -> None:
    assert "model.d_model is for task pretrain" in refusal(tmp_path, model={"name_or_path": "m", "d_model": 64})
    assert "data.doc_stride is for task graph, qa and tokens" in refusal(
        tmp_path, data={"dataset_name": "r", "doc_stride": 3}
    )
    assert "training.label_smoothing" in refusal(tmp_path, task="qa", training={"label_smoothing": 0.1})
    assert "model.name_or_path is for task graph, sft, qa, " in refusal(tmp_path, task="pretrain")
    assert "model.leaves is for task graph, and" in refusal(tmp_path, task="pretrain", model={"leaves": 2})
    assert "revision is for task graph with model.name_or_path" in refusal(
        tmp_path, task="graph", model={"revision": "v1"}, data={}
    )
    assert "model.decay is for task graph, and has no effect in graph with model.name_or_path" in refusal(
        tmp_path, task="graph", model={"name_or_path": "m", "decay": "none"}
    )
    assert "set model.name_or_path" in refusal(tmp_path, model={})
    assert "set data.dataset_name" in refusal(tmp_path, data={})
    assert "lora_rank has no effect with adapter none" in refusal(tmp_path, model={"name_or_path": "m", "lora_rank": 4})
    assert "set optimizer to adamw" in refusal(tmp_path, training={"optimizer_state": "8bit", "optimizer": "muon"})
    for precision in ("fp32", "int16", "int8"):
        narrow = {"master_weights": "bf16", "precision": precision}
        assert f"precision is {precision}" in refusal(tmp_path, training=narrow)


def test_streaming_is_no_part_of_a_training_configuration(tmp_path: Path) -> None:
    said = refusal(tmp_path, sampling={"stream": True})
    assert "sampling.stream" in said
    assert said.count(". ") == 0
    assert "sampling.top_k has no effect in training" in refusal(tmp_path, sampling={"stream": False, "top_k": 3})
    (tmp_path / "quiet.json").write_text(json.dumps({**SFT, "sampling": {"stream": False}}))
    assert load_config(tmp_path / "quiet.json")[0] == Config.model_validate(SFT)


@pytest.mark.parametrize(("name", "window"), [("graph_80m", 512), ("graph_80m_2048", 2048)])
def test_a_large_graph_encoder_is_shipped_for_two_windows(name: str, window: int) -> None:
    config, _ = load_config(Path(__file__).parents[2] / f"configs/{name}.yaml")
    model = config.model
    assert (config.window, model.n_layers, model.d_model, model.d_ff) == (window, 12, 768, 3072)
    assert (config.training.batch_size, config.training.gradient_accumulation_steps) == (1, 4)


def test_graphs_have_defaults_and_limits_of_their_own(tmp_path: Path) -> None:
    config = Config.model_validate({"task": "graph"})
    assert (config.kind, config.roots, config.window, max_span(config)) == ("graph", 128, 512, 3)
    assert config.data.dataset_name == "python-stdlib-graph"
    masked = Config.model_validate({"task": "graph", "model": {"name_or_path": "m"}, "data": {"dataset_name": "t"}})
    assert (masked.kind, masked.window, max_span(masked)) == ("masked", 128, 1)
    graph = {"task": "graph", "data": {}}
    assert "swiglu is only for decoders" in refusal(tmp_path, **graph, model={"activation": "swiglu"})
    assert "has no triples; set it to python-stdlib-graph" in refusal(
        tmp_path, task="graph", model={}, data={"dataset_name": "python-stdlib"}
    )
    assert "there is nothing to predict" in refusal(
        tmp_path, task="graph", model={}, data={"mask_ratio": 0, "leaf_mask_ratio": 0}
    )
    assert "has no effect because model.decay is none" in refusal(
        tmp_path, task="graph", model={"decay": "none", "decay_base": 0.5}, data={}
    )
    assert "whose tails have no text" in refusal(tmp_path, task="graph", model={}, data={"inverse_relations": True})
    assert "no room for text between" in refusal(
        tmp_path, task="graph", model={"name_or_path": "m"}, data={"dataset_name": "t", "max_length": 2}
    )
    assert "longer than model.max_seq_len 64" in refusal(
        tmp_path, task="graph", model={"max_seq_len": 64}, data={"max_length": 65}
    )
    assert "set data.dataset_name" in refusal(tmp_path, task="graph", model={"name_or_path": "m"}, data={})


@pytest.mark.parametrize("task", ["pretrain", "sft", "qa"])
def test_a_saved_configuration_has_only_keys_with_an_effect_and_loads_unchanged(tmp_path: Path, task: str) -> None:
    config = Config() if task == "pretrain" else Config.model_validate({**SFT, "task": task})
    save_config(config, tmp_path / "c.yaml")
    assert load_config(tmp_path / "c.yaml")[0] == config
    text = (tmp_path / "c.yaml").read_text()
    assert ("d_model" in text) == (task == "pretrain")
    assert ("doc_stride" in text) == (task == "qa")


def test_objective_has_no_effect_with_a_task_outside_the_package() -> None:
    with pytest.raises(ValidationError, match="objective has no effect, because task"):
        Config.model_validate({"task": "mine:Task", "objective": "other:Task"})
