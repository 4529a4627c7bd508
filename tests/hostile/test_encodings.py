"""Commands print to terminals, files and pipes whose encoding lacks characters; JSON and files stay complete."""

import json
import random
from pathlib import Path

import pytest

from tests.processes import ended, environment, finish, fork_server, json_lines, settings, write_rows

ROOT = Path(__file__).parents[2]
PROMPT = "Der Bäcker backt „frisch“, 日本 😀"
WORDS = f"{PROMPT} Brötchen – naïve Straße".split()
FIT = """
import sys, yaml
from sansgpu import fit
changes = [a for a in sys.argv[2:] if a != "--set"]
fit(output_dir=sys.argv[1], overrides=changes)
"""


def fill(home: Path) -> None:
    draw = random.Random(0)
    rows = ({"text": " ".join(draw.choices(WORDS, k=60))} for _ in range(40))
    write_rows(home / "Bücher 日本.jsonl", (json.dumps(row, ensure_ascii=False) for row in rows))
    write_rows(home / "prompts.jsonl", [{"prompt": PROMPT}])
    (home / "train_from_python.py").write_text(FIT, encoding="utf-8")


def chosen(home: Path) -> list[str]:
    return settings(data__dataset_name=home / "Bücher 日本.jsonl", training__max_steps=3, training__sample_tokens=9)


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("cp1252", "Der Bäcker backt „frisch“, ?? ?"),
        pytest.param("ascii", "Der B?cker backt ?frisch?, ?? ?", marks=pytest.mark.long),
    ],
)
def test_commands_print_what_the_encoding_can_show(home: Path, encoding: str, shown: str) -> None:
    run, variables = home / f"Läufe 日本/{encoding}", {"PYTHONIOENCODING": encoding}

    def out(*arguments: object) -> str:
        code, out, err = finish([*map(str, arguments)], home / "cache", **variables)
        assert (code, "Traceback" in err) == (0, False), err
        return out

    trained = out("train", *chosen(home), "--output-dir", run)
    assert "sample: " in trained
    assert "sansgpu eval '{}'\n".format(str(run).encode(encoding, "replace").decode(encoding)) in trained
    assert out("generate", run, "--prompt", PROMPT, "--max-new-tokens", 3).startswith(shown)
    assert "between [[ and ]]" in out("train", ROOT / "examples/graph.yaml", "--dry-run", "--output-dir", home / "dry")
    for command in (["runs", home / "Läufe 日本"], ["eval", run]):
        assert out(*command).strip()
    code, _, err = finish(["eval", str(home / "日本")], home / "cache", **variables)
    assert code == 2
    assert "\\u65e5\\u672c" in err  # Python escapes what stderr cannot show

    lines = out("train", *chosen(home), "--output-dir", home / f"{encoding} headless", "--headless").splitlines()
    record = home / f"{encoding} headless/metrics.jsonl"
    assert [json.loads(line).get("sample") for line in lines] == [event.get("sample") for event in json_lines(record)]
    assert "".join(lines).isascii()
    assert not record.read_text(encoding="utf-8").isascii()

    written = [home / f"{encoding}-ä.jsonl", home / f"{encoding}-utf8.jsonl"]
    for file, more in zip(written, (variables, {}), strict=True):
        arguments = ["generate", run, "--data", home / "prompts.jsonl", "--output", file, "--max-new-tokens", 3]
        assert finish([*map(str, arguments), "--temperature", "0"], home / "cache", **more)[0] == 0
    assert written[0].read_bytes() == written[1].read_bytes()
    assert PROMPT in written[0].read_text(encoding="utf-8")

    surroundings = environment(home / "cache") | {"PYTHONPATH": str(home)} | variables
    arguments = [str(home / f"{encoding} python"), *chosen(home)]
    code, trained, err = ended(fork_server().start(arguments, surroundings, "train_from_python"))
    assert (code, "sample: " in trained) == (0, True), err
