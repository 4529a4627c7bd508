"""`data.template_variables` is a mapping that is set, checked, recorded and compared as one value."""

from __future__ import annotations

from pathlib import Path

import pytest

from sansgpu.config import ConfigError
from sansgpu.config.identity import identity, require_identity
from sansgpu.config.load import acting_values, change_config, flatten, save_config
from sansgpu.tasks.configuration import default_values, load_config

KEY = "data.template_variables"
CHAT = "task=sft", "model.name_or_path=folder", "data.dataset_name=rows.jsonl"


@pytest.mark.parametrize(
    "overrides",
    [
        (f"{KEY}={{enable_thinking: false, style: a b}}",),
        (f"{KEY}.enable_thinking=false", f"{KEY}.style=a b"),
        (f'{KEY}={{"enable_thinking": false, "style": "a b"}}',),
    ],
)
def test_variables_are_recorded_and_loaded_again(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config, _ = load_config(None, [*CHAT, *overrides])
    assert config.data.template_variables == {"enable_thinking": False, "style": "a b"}
    save_config(config, tmp_path / "config.yaml")
    again, _ = load_config(tmp_path / "config.yaml")
    assert again.data.template_variables == config.data.template_variables
    values = acting_values(config)
    assert flatten(values)[KEY] == {"enable_thinking": False, "style": "a b"}
    assert default_values(values)[KEY] == {}


def test_a_run_belongs_to_its_variables(tmp_path: Path) -> None:
    plain, _ = load_config(None, CHAT)
    config = change_config(plain, [f"{KEY}.enable_thinking=false"])
    recorded = [identity(config)]
    require_identity(tmp_path, acting_values(config), recorded)
    for other in (plain, change_config(config, [f"{KEY}.enable_thinking=true"]), change_config(config, [f"{KEY}.a=1"])):
        with pytest.raises(ConfigError, match="template_variables is"):
            require_identity(tmp_path, acting_values(other), recorded)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{messages: []}", '"messages" cannot be a variable'),
        ("{a b: 1}", '"a b" cannot be a variable'),
        ("{__class__: 1}", "cannot be a variable"),
        ("{größe: 1}", "cannot be a variable"),
        ("{a: .inf}", "finite"),
        ("no", "keys and values"),
        ("{1: 2}", "template_variables"),
    ],
)
def test_values_that_cannot_be_variables_are_refused(value: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*CHAT, f"{KEY}={value}"])
    assert words in str(caught.value)


def test_other_programs_switches_name_the_key() -> None:
    for name in ("enable_thinking", "chat_template_kwargs"):
        with pytest.raises(ConfigError, match=r"data\.template_variables"):
            load_config(None, [*CHAT, f"data.{name}=false"])
