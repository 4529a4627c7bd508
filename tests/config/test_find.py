"""Configurations are found by name, and relative paths in a configuration are also found next to its file."""

from pathlib import Path

import pytest

from sansgpu.config import Config, ConfigError
from sansgpu.tasks.configuration import load_config

REPOSITORY = Path(__file__).parents[2]


def test_a_missing_file_names_the_nearest_configuration(tmp_path: Path) -> None:
    (tmp_path / "short.yaml").write_text("device: cpu")
    (tmp_path / "shor.yaml").write_text("services: {}")  # a YAML file that is not a configuration
    (tmp_path / "shor.yml").write_text("{")
    with pytest.raises(ConfigError, match=r"sho\.yaml does not exist \(did you mean [^)]*/short\.yaml\?\)"):
        load_config(tmp_path / "sho.yaml")
    (tmp_path / "short.yaml").unlink()
    with pytest.raises(ConfigError, match=r"sho\.yaml does not exist; pass a file, or one of small, medium, large, "):
        load_config(tmp_path / "sho.yaml")


def test_a_configuration_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("nano"))[0] == load_config(REPOSITORY / "configs/nano.yaml")[0]
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/nano.toml").write_text("training.seed = 7")
    (tmp_path / "configs/small.yaml").write_text("training: {seed: 8}")
    (tmp_path / "configs/compose.yaml").write_text("services: {}")
    assert load_config(Path("nano"))[0].training.seed == 7
    assert load_config(Path("small"))[0].training.seed == Config().training.seed  # the preset
    with pytest.raises(ConfigError, match=r"nan does not exist \(did you mean nano\?\)") as caught:
        load_config(Path("nan"))
    assert "small, medium, large, nano, " in str(caught.value)
    assert "compose" not in str(caught.value)
    assert load_config(Path("configs/tiny.yaml"))[0].training.seed == Config().training.seed, "sansgpu's own"
    (tmp_path / "nano").write_text("")
    with pytest.raises(ConfigError, match="nano has an unknown file type"):
        load_config(Path("nano"))


@pytest.mark.parametrize(
    ("path", "name"), [("configs/cpu_small_model.yaml", "cpu_small"), ("models/nano.yaml", "nano")]
)
def test_a_missing_file_that_a_guide_names_is_replaced_by_ours(
    path: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config, [note] = load_config(Path(path))
    assert config == load_config(Path(name))[0]
    assert note == f"{path} does not exist; {REPOSITORY}/configs/{name}.yaml is used, which has the same purpose."
    (tmp_path / path).parent.mkdir()
    (tmp_path / path).write_text("training: {seed: 5}")
    assert load_config(Path(path))[0].training.seed == 5


PATHS = """
model: {name_or_path: base}
data: {dataset_name: texts, validation_name: texts/held.txt, chat_template: simple, tokenizer: bpe}
"""


def test_paths_are_also_found_next_to_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, here = tmp_path / "beside", tmp_path / "here"
    for folder in (beside / "texts", beside / "base", here):
        folder.mkdir(parents=True)
    for name in ("texts/held.txt", "simple", "bpe", "a.yaml"):
        (beside / name).write_text(PATHS.replace("model", "task: sft\nmodel").replace(", tokenizer: bpe", ""))
    monkeypatch.chdir(here)

    def loaded(*overrides: str, **options: bool) -> tuple[list[str | None], list[str]]:
        config, notes = load_config(Path("../beside/a.yaml"), overrides, **options)
        data = config.data
        return [config.model.name_or_path, data.dataset_name, data.validation_name, data.chat_template], notes

    texts = str(beside / "texts")
    assert loaded() == ([str(beside / "base"), texts, f"{texts}/held.txt", "simple"], [])
    assert loaded("data.dataset_name=base")[0][1] == "base"  # relative to the working directory
    as_written = (["base", "texts", "texts/held.txt", "simple"], [])
    assert loaded(trusted=False) == loaded(find_beside=False) == as_written
    (here / "texts").mkdir()
    found, notes = loaded()
    assert found == [str(beside / "base"), "texts", f"{texts}/held.txt", "simple"]
    (note,) = notes
    assert loaded("data.dataset_name=texts")[1] == []
    assert note.startswith("data.dataset_name: texts exists in the working directory and as ")
    monkeypatch.chdir(beside)
    assert load_config(Path("a.yaml"))[1] == []
