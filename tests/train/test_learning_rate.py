"""The default learning rate follows optimizer and width, is shown and recorded, and stays when a run resumes."""

import json
from pathlib import Path

import pytest
import yaml

import sansgpu
from sansgpu.cli import run as cli
from sansgpu.config import Config, TrainingConfig, acting_values
from sansgpu.planning.resolve import with_optimizer
from sansgpu.tasks.configuration import default_values, load_config
from tests.processes import events_of, record, settings, train, write_corpus

SFT = {"task": "sft", "model": {"name_or_path": "m"}, "data": {"dataset_name": "rows.jsonl"}}
# With windows of 8 tokens, orthogonalization would be most of the work of a step, so `auto` chooses adamw.
ADAMW = {"training__optimizer": "auto", "model__d_model": 64, "model__max_seq_len": 8, "training__max_steps": 2}
MUON = {**ADAMW, "model__max_seq_len": 32, "training__gradient_accumulation_steps": 256, "training__batch_size": 64}


@pytest.fixture(autouse=True)
def _in_a_folder_with_data(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus.jsonl")


def rate(optimizer: str, **values: object) -> float:
    training = {"optimizer": optimizer}
    return Config.model_validate({**values, "training": training}).training.learning_rate


def test_the_default_follows_the_optimizer_and_the_width() -> None:
    rates = {
        name: [rate(name, model={"d_model": width}) for width in (64, 256, 768)]
        for name in ("muon", "adamw", "adam", "sgd")
    }
    adamw = [0.002, 0.001, 0.00058]
    assert rates == {"muon": [0.004, 0.004, 0.0023], "adamw": adamw, "adam": adamw, "sgd": [0.2, 0.1, 0.058]}
    assert rate("adamw", task="graph", model={"d_model": 768}) == 0.00058
    assert [rate(name, **SFT) for name in ("muon", "adamw", "adam", "sgd")] == [2e-5, 2e-5, 2e-5, 2e-3]
    given = {"optimizer": "adamw", "learning_rate": 0.004}
    assert Config.model_validate({"training": given}).training.learning_rate == 0.004


@pytest.mark.parametrize(("changes", "optimizer", "expected"), [(ADAMW, "adamw", 0.002), (MUON, "muon", 0.004)])
def test_a_run_that_chooses_its_optimizer_shows_and_records_its_rate(
    changes: dict[str, object], optimizer: str, expected: float, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [*settings(data__dataset_name="corpus.jsonl", **changes)]
    assert cli(["plan", *chosen, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["optimizer"], plan["learning_rate"]) == (optimizer, expected)
    assert cli(["train", *chosen, "--dry-run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["config"]["training"]["learning_rate"] == expected
    if optimizer == "muon":
        return
    assert train(Path(), Path("run"), **changes) == 0
    assert f"{optimizer} at a learning rate of {expected}" in capsys.readouterr().out
    assert load_config(Path("run/config.yaml"))[0].training.learning_rate == expected
    assert record(Path("run"))[0]["learning_rate"] == expected


@pytest.mark.parametrize(
    ("task", "adapter", "expected"),
    [
        ("classify", "none", {128: 1e-4, 384: 1e-4, 768: 5e-5, 1024: 5e-5}),
        ("classify", "lora", {384: 1e-3, 1024: 8.6e-4, 2048: 5e-4}),
        ("qa", "lora", {384: 1e-3}),
        ("embed", "none", {384: 4e-5}),
    ],
)
def test_the_default_of_fine_tuning_follows_the_width_of_the_model(
    task: str, adapter: str, expected: dict[int, float], tmp_path: Path
) -> None:
    rates = {}
    for width in expected:
        sizes = {"hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        described = {"model_type": "bert", "architectures": ["BertModel"], "vocab_size": 100, **sizes}
        folder = tmp_path / f"width-{width}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(described))
        own = {"task": task, "model.name_or_path": folder, "model.adapter": adapter, "data.dataset_name": "rows.jsonl"}
        config, _ = load_config(None, [f"{key}={value}" for key, value in own.items()])
        rates[width] = with_optimizer(config, 1000)[0].training.learning_rate
    assert rates == expected


def test_a_written_configuration_leaves_the_rate_to_a_run_that_chooses_its_optimizer() -> None:
    assert "learning_rate" not in acting_values(Config())["training"]
    for training in ({"learning_rate": 0.004}, {"optimizer": "adamw"}):
        config = Config.model_validate({"training": training})
        assert acting_values(config)["training"]["learning_rate"] == config.training.learning_rate
    values = acting_values(Config.model_validate({"training": {"optimizer": "adamw"}, "model": {"d_model": 1024}}))
    assert default_values(values)["training.learning_rate"] == values["training"]["learning_rate"] == 0.0005
    defaults = default_values(acting_values(Config()))
    assert defaults["training.learning_rate"] == TrainingConfig().learning_rate
    assert "training.batch_size: auto" in yaml.safe_dump(defaults)  # run reports show them as YAML


def test_a_resumed_run_keeps_the_optimizer_that_it_chose(capsys: pytest.CaptureFixture[str]) -> None:
    """A different length of its windows, or a different version, would choose another one."""
    chosen = {"training__optimizer": "auto", "training__save_steps": 2, "model__d_model": 64, "model__max_seq_len": 8}
    assert train(Path(), Path("run"), training__max_steps=2, **{**chosen, "training__optimizer": "muon"}) == 0
    assert "muon at" in capsys.readouterr().out
    assert train(Path(), Path("run"), "--resume", training__max_steps=4, **chosen) == 0
    assert "muon at" in capsys.readouterr().out
    assert train(Path(), Path("new"), training__max_steps=2, **chosen) == 0
    assert "adamw at" in capsys.readouterr().out


def test_a_run_resumes_with_its_recorded_rate_unless_another_is_given() -> None:
    """A run of an earlier version may have recorded a different default."""
    changes = {"training__optimizer": "adamw", "training__lr_scheduler": "constant", "training__save_steps": 2}
    assert train(Path(), Path("run"), training__learning_rate=0.009, training__max_steps=2, **changes) == 0
    assert train(Path(), Path("run"), "--resume", training__max_steps=4, **changes) == 0
    more = ["--resume", "--set", "training.learning_rate=0.001"]
    assert train(Path(), Path("run"), *more, training__max_steps=6, **changes) == 0
    rates = [event["lr"] for event in record(Path("run")) if event["event"] == "step"]
    assert rates[1:] == [0.009, 0.001]


def test_a_search_of_the_rate_is_around_that_of_the_chosen_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = settings(data__dataset_name="corpus.jsonl", **ADAMW)
    assert cli(["tune", *chosen, "--trials", "2", "--dry-run"]) == 0
    assert "0.0005 to 0.008" in capsys.readouterr().out


def test_fit_trains_with_the_rate_of_an_assigned_optimizer() -> None:
    config = Config.model_validate({"model": {"d_model": 32, "n_heads": 2, "n_layers": 1, "max_seq_len": 32}})
    config.training.optimizer, config.training.max_steps = "adamw", 1
    config.data.dataset_name, config.data.vocab_size = "corpus.jsonl", 300
    sansgpu.fit(config, Path("run"))
    assert load_config(Path("run/config.yaml"))[0].training.learning_rate == 0.0028


@pytest.mark.long
def test_a_resumed_run_with_more_epochs_tells_its_learning_rate(capsys: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, object] = {
        "data__vocab_size": 280, "training__gradient_accumulation_steps": 64, "training__lr_scheduler": "linear",
        "training__save_steps": 0, "training__eval_steps": 0, "training__logging_steps": 1,
    }  # fmt: skip
    assert train(Path(), Path("run"), **changes, training__num_epochs=1) == 0
    first = events_of(Path("run"), "step")[-1]
    steps = first["step"]
    capsys.readouterr()
    assert train(Path(), Path("run"), "--resume", **changes, training__num_epochs=2) == 0
    shown = "".join(capsys.readouterr())
    next_rate = next(event["lr"] for event in events_of(Path("run"), "step") if event["step"] == steps + 1)
    assert next_rate != first["lr"]
    assert f"the run now has {2 * steps} steps instead of {steps}, and training.lr_scheduler linear covers" in shown
    assert f"the learning rate of the next step is {next_rate:.3g}, where it was {first['lr']:.3g}." in shown
    assert train(Path(), Path("run"), "--resume", **changes, training__num_epochs=2) == 0
    assert "the run now has" not in "".join(capsys.readouterr())
    assert train(Path(), Path("run"), "--resume", **changes, training__max_steps=1) == 0
    assert f"the run is at step {2 * steps} and now ends after 1, so it is not" in "".join(capsys.readouterr())
