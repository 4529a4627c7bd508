"""`sansgpu eval --harness` gives the results of lm-evaluation-harness with its own models, and refuses bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sansgpu.cli import run as cli
from sansgpu.train.loading import ModelRequest
from tests.processes import finish, json_of, messages, refused, settings, train_once, write_corpus, write_rows
from tests.tasks.fine_tuned import made
from tests.tasks.tokenizer_kinds import folder_of

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate", reason="lm-evaluation-harness's own models need it")
pytestmark = pytest.mark.usefixtures("home")

QUESTIONS = [
    {"question": f"The {animal} is", "choices": ["a red house", "old", "an old fox that runs"], "label": number % 3}
    for number, animal in enumerate(("fox", "cat", "house", "quick brown fox"))
]
TEXTS = ["the old house by the river " * count for count in (1, 3, 40)]  # the last one is longer than the context
KINDS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "label",
        "doc_to_choice": "choices",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
        ],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "texts": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[label]}}",
        "generation_kwargs": {"until": [" a", "x"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


def write_task(folder: Path, name: str, **changes: object) -> Path:
    """Writes a task of one of the KINDS, or with the keys `changes`, and its data."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "rows.jsonl", QUESTIONS)
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}}, "test_split": "test"}
    task = {"task": f"local_{name}", **data, **KINDS.get(name, KINDS["choices"]), **changes}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({key: value for key, value in task.items() if value is not None}))  # JSON is YAML, too
    return path


def fill(home: Path) -> None:
    write_corpus(home / "corpus.jsonl")
    train_once(home / "run", settings(data__dataset_name=home / "corpus.jsonl", training__max_steps=8))
    folder_of(home / "llama", "llama")
    for name in KINDS:
        write_task(home / "tasks", name)


def harness(capsys: pytest.CaptureFixture[str], model: Path, tasks: object, *more: object) -> dict[str, Any]:
    return json_of(capsys, "eval", model, "--harness", tasks, *more)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


@pytest.mark.parametrize("name", ["run", "adapter", pytest.param("llama", marks=pytest.mark.long)])
def test_every_request_gets_the_result_of_the_librarys_own_model(name: str, home: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    from sansgpu.jobs.generate import open_generator
    from sansgpu.jobs.harness.model import HarnessModel

    model = folder = home / name
    if name == "run":
        folder = home / "run/final"
    elif name == "adapter":
        model, folder = adapter(home), home / "merged"
    ours = HarnessModel(open_generator(ModelRequest(str(model), precision="fp32"), pytest.fail), print, lambda *_: None)
    # Their cache gives wrong results if the same text is divided into context and continuation at different places.
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=3, logits_cache=False)
    assert ours.max_length == theirs.max_length
    contexts = ("", "The fox", "The fox ", "The old house\n", TEXTS[2], "naïve café", "<s>The fox")
    pairs = [(context, end) for context in contexts for end in (" is", " is red and old", "\n", " is red")]
    pairs.append(("The f", "ox is"))
    scored = requests("loglikelihood", *pairs)
    for found, expected in zip(ours.loglikelihood(scored), theirs.loglikelihood(scored), strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    texts = requests("loglikelihood_rolling", *((text,) for text in (*TEXTS, "x", "")))
    assert ours.loglikelihood_rolling(texts) == pytest.approx(theirs.loglikelihood_rolling(texts), abs=1e-3)
    ends: tuple[object, ...] = ([" "], [], "e", ["zz"])
    for prompts in (contexts[1:-1], contexts[-1:]):  # in a batch that begins with <s>, theirs adds it to no prompt
        given = [(prompt, {"until": until, "max_gen_toks": 8}) for prompt in prompts for until in ends]
        written = requests("generate_until", *given)
        assert ours.generate_until(written) == theirs.generate_until(written)


def adapter(home: Path) -> Path:
    """Trains an adapter, writes the merged model to the folder merged, and returns the run."""
    answers = [{"role": "assistant", "content": f"hello {number}"} for number in range(40)]
    write_rows(home / "chat.jsonl", [{"messages": [{"role": "user", "content": "hi"}, answer]} for answer in answers])
    run = made(home, "adapter", model__adapter="lora", model__name_or_path=home / "llama", data__chat_template="simple")
    assert cli(["export", str(run), "--merge", "--output", str(home / "merged")]) == 0
    return run


@pytest.mark.parametrize("kind", KINDS)
def test_the_metrics_are_those_of_the_library(kind: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    task = home / "tasks" / f"{kind}.yaml"
    found = harness(capsys, home / "llama", task)["tasks"][f"local_{kind}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(task.parent)
        theirs: Any = lm_eval.simple_evaluate(
            "hf",
            {"pretrained": str(home / "llama"), "dtype": "float32"},
            tasks=[str(task)],
            device="cpu",
            task_manager=TaskManager(include_defaults=False),
        )
    expected = theirs["results"][f"local_{kind}"]
    metrics = {key: value for key, value in expected.items() if key.endswith(",none") and value != "N/A"}
    assert found["metrics"] == pytest.approx(
        {key.removesuffix(",none"): value for key, value in metrics.items()}, rel=1e-4
    )
    assert found["examples"] == len(QUESTIONS)


def test_a_folder_of_tasks_and_its_groups_is_evaluated(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        write_task(tmp_path, name, tag="pair")
    write_task(tmp_path, "alone", include="_more.yaml", fewshot_split="test", num_fewshot=None)
    (tmp_path / "_more.yaml").write_text("fewshot_delimiter: '; '\n")
    group = {"group": "both", "task": ["pair"], "aggregate_metric_list": [{"metric": "acc"}]}
    (tmp_path / "group.yaml").write_text(json.dumps(group))
    found = harness(capsys, home / "run", f"{tmp_path}/", "--fewshot", 2, "--limit", 3)
    tasks = found["tasks"]
    assert sorted(tasks) == ["both", "local_alone", "local_one", "local_two"]
    assert tasks["local_alone"]["fewshot"] == 2
    assert tasks["local_one"]["examples"] == 3
    assert tasks["both"]["metrics"]["acc"] == pytest.approx(
        (tasks["local_one"]["metrics"]["acc"] + tasks["local_two"]["metrics"]["acc"]) / 2
    )


def test_results_are_added_to_the_file_of_a_run(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = home / "run/harness.json"
    file.unlink(missing_ok=True)
    first = harness(capsys, home / "run", home / "tasks/choices.yaml")
    second = harness(capsys, home / "run", home / "tasks/rolling.yaml", "--limit", 2, "--precision", "int8")
    known = json.loads(file.read_text())
    assert known["local_choices"]["metrics"] == first["tasks"]["local_choices"]["metrics"]
    assert known["local_choices"]["step"] == first["step"] == 8
    assert known["local_rolling"] == {
        "step": 8,
        "precision": "int8",
        "limit": 2,
        "chat_template": False,
        **second["tasks"]["local_rolling"],
    }
    assert not (home / "llama/harness.json").exists()
    file.write_text("[")
    assert "harness.json is damaged" in refused(capsys, "eval", home / "run", "--harness", home / "tasks/choices.yaml")
    file.unlink()


def test_a_table_shows_each_metric_with_its_error(home: Path) -> None:
    code, printed, error = finish(["eval", str(home / "run"), "--harness", str(home / "tasks")], home / "cache")
    assert code == 0, error
    assert printed.splitlines()[0].split() == ["task", "metric", "value", "stderr", "shots", "examples"]
    rows = [line.split() for line in printed.splitlines()[1:] if line.startswith("local_choices")]
    assert [row[1] for row in rows] == ["acc", "acc_norm"]
    assert all(float(row[3]) >= 0 and row[4:] == ["0", "4"] for row in rows)
    assert messages(error) == []


def test_a_chat_template_surrounds_prompts(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer

    from sansgpu.jobs.generate import open_generator
    from sansgpu.jobs.harness.model import HarnessModel

    model = folder_of(tmp_path / "chat", "llama")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template + "{% if add_generation_prompt %}<assistant>{% endif %}"
    tokenizer.save_pretrained(model)
    ours = HarnessModel(open_generator(ModelRequest(str(model)), pytest.fail), print, lambda *_: None)
    turns = [{"role": "user", "content": "hi"}]
    begun = [*turns, {"role": "assistant", "content": "It is "}]
    for messages_, new in ((turns, True), (begun, False)):
        expected = tokenizer.apply_chat_template(
            messages_, tokenize=False, add_generation_prompt=new, continue_final_message=not new
        )
        assert ours.apply_chat_template(messages_, new) == expected
    task = write_task(tmp_path / "tasks", "choices")
    plain, chat = (
        harness(capsys, model, task, *more)["tasks"]["local_choices"] for more in ([], ["--apply-chat-template"])
    )
    assert plain["examples"] == chat["examples"]
    file = home / "tasks/choices.yaml"
    error = refused(capsys, "eval", home / "run", "--harness", file, "--apply-chat-template")
    assert "has no chat template; remove --apply-chat-template" in error


Refused = tuple[dict[str, object], str]
REFUSED: dict[str, Refused] = {
    "metric": ({"metric_list": [{"metric": "./evil"}]}, "./evil is not a metric of lm-evaluation-harness"),
    "evaluate": ({"metric_list": [{"metric": "acc", "hf_evaluate": True}]}, "acc is not a metric of"),
    "prompt": ({"use_prompt": "promptsource:*"}, "loads prompts of other packages"),
    "template": (
        {"doc_to_text": "{{ cycler.__init__.__globals__.os.system('touch ran') }}"},
        "task local_template cannot be used: SecurityError",
    ),
    "endless": ({"doc_to_text": "{% for a in range(9999) %}" * 3 + "{% endfor %}" * 3}, "takes more than 2 seconds"),
    "memory": ({"doc_to_text": "{{ 'a' * 3000000000 }}"}, "{{ 'a' * 3000000000 }} needs more than 1 GB of memory"),
    "size": ({"doc_to_choice": "{{ ['a' * 20000000] }}"}, "its template produces more than 16 million characters"),
    "column": ({"doc_to_text": "{{ missing }}"}, "task local_column cannot be used: UndefinedError"),
    "split": ({"test_split": "other"}, "task local_split cannot be used (KeyError"),
    "nothing": ({**KINDS["rolling"], "output_type": "loglikelihood", "doc_to_target": "{{''}}"}, "without tokens"),
    "beams": (
        {**KINDS["texts"], "generation_kwargs": {"until": ["x"], "num_beams": 4}},
        "num_beams: 4 in generation, which sansgpu does not support",
    ),
    "long": (
        {**KINDS["texts"], "generation_kwargs": {"until": ["x"], "max_gen_toks": 999}},
        "a task generates up to 999 tokens, but the model's context has only",
    ),
    "pickle": ({"dataset_path": "pandas"}, "dataset_path pandas may run code in the data; convert the data to JSON"),
    "database": ({"dataset_path": "iceberg", "dataset_kwargs": {"catalog": "x"}}, "dataset_path iceberg may run code"),
    "group": (
        {"group": "all", "task": [{"task": "arc_easy", "dataset_path": "pandas"}]},
        "dataset_path pandas may run code",
    ),
    "storage": ({"dataset_kwargs": {"data_files": "x.json", "storage_options": {}}}, 'dataset_kwargs has "storage_opt'),
    "chain": ({"dataset_kwargs": {"data_files": {"test": ["reference::x.json"]}}}, "reads data from reference::x.json"),
    "scheme": ({"dataset_kwargs": {"data_files": "ssh://host/x.json"}}, "reads data from ssh://host/x.json"),
    "address": ({"dataset_kwargs": {"data_files": {"test": "http://127.0.0.1:1/x.json"}}}, "reads data from http://"),
    "device": ({"dataset_path": "text", "dataset_kwargs": {"data_files": "/dev/zero"}}, "/dev/zero is a pipe, a dev"),
    "list": ({"dataset_path": ["pandas"]}, "must be a name or a path"),
    "unsafe": ({"unsafe_code": True}, "runs Python code that the model writes"),
    "unnamed": ({"task": None}, "defines no task"),
    "numbered": ({"task": 7}, "must be the name of the task"),
    "files": ({"dataset_kwargs": {"data_files": "none.jsonl"}}, "the data of task local_files cannot be loaded"),
    "hub": (
        {"dataset_path": "someone/nothing", "dataset_kwargs": None},
        "the dataset of task local_hub is not in the cache of `datasets`, and the Hub is unreachable",
    ),
    "itself": ({"include": "itself.yaml"}, "itself.yaml includes itself"),
    "absent": ({"include": "other.yaml"}, "other.yaml does not exist"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_task_that_cannot_be_used_is_refused_in_one_sentence(
    name: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sansgpu.machine.hub.reachable", lambda address: False)
    changes, sentence = REFUSED[name]
    error = refused(capsys, "eval", home / "run", "--harness", write_task(tmp_path, name, **changes))
    assert sentence in error
    assert not (tmp_path / "ran").exists()


def test_code_of_a_task_runs_only_if_it_is_allowed(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code.py").write_text("open('ran', 'w')\n\ndef text(row):\n    return row['question']\n")
    task = write_task(tmp_path, "choices", doc_to_text=None)
    task.write_text(task.read_text()[:-1] + ', "doc_to_text": !function code.text}')
    (tmp_path / "included.yaml").write_text(f"include: {task.name}\ntask: other\n")
    for file in (task, tmp_path / "included.yaml", f"{tmp_path}/"):
        error = refused(capsys, "eval", home / "run", "--harness", file)
        assert "imports Python code with !function; pass --trust-remote-code if you trust it" in error
    assert not (tmp_path / "ran").exists()
    allowed = harness(capsys, home / "run", task, "--trust-remote-code")["tasks"]["local_choices"]
    plain = harness(capsys, home / "run", home / "tasks/choices.yaml")["tasks"]["local_choices"]
    assert (tmp_path / "ran").exists()
    assert allowed["metrics"] == plain["metrics"]


def test_options_and_models_that_do_not_fit_are_refused(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, run = home / "tasks/choices.yaml", home / "run"
    assert "--fewshot requires --harness" in refused(capsys, "eval", run, "--fewshot", 2)
    assert "--apply-chat-template requires --harness" in refused(capsys, "eval", run, "--apply-chat-template")
    assert "--limit requires --link-prediction, --harness or" in refused(capsys, "eval", run, "--limit", 2)
    for option, value in (("--data", "x.txt"), ("--mteb", "STS17"), ("--reward", "answer")):
        assert f"{option} has no effect with --harness; remove it" in refused(
            capsys, "eval", run, "--harness", task, option, value
        )
    assert "--harness is empty" in refused(capsys, "eval", run, "--harness", " , ")
    assert "./none.yaml does not exist" in refused(capsys, "eval", run, "--harness", "./none.yaml").replace(
        "none", "./none", 1
    )
    assert "no YAML file that defines a task" in refused(capsys, "eval", run, "--harness", f"{tmp_path}/")
    encoder = write_encoder(tmp_path / "encoder")
    assert "computes embeddings; --harness needs a model that generates text" in refused(
        capsys, "eval", encoder, "--harness", task
    )


def write_encoder(folder: Path) -> Path:
    from transformers import BertConfig, BertModel

    folder_of(folder, "llama")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40}
    BertModel(BertConfig(vocab_size=400, **shape)).save_pretrained(folder)
    return folder


@pytest.mark.long
def test_names_are_those_of_the_library(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading the library's 14,000 files takes 10 seconds, each time."""
    monkeypatch.setattr("sansgpu.machine.hub.reachable", lambda address: False)
    assert "has no task hellaswagg; did you mean hellaswag?" in refused(
        capsys, "eval", home / "run", "--harness", "hellaswagg"
    )
    error = refused(capsys, "eval", home / "run", "--harness", "arc_easy")
    assert "the dataset of task arc_easy is not in the cache of `datasets`, and the Hub is unreachable" in error
