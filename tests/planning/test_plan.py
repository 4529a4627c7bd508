"""`sansgpu plan`, `bench` and `doctor` print the promised values, and training does what a plan predicts."""

import io
import json
import re
import subprocess
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from sansgpu.cli import run as cli
from sansgpu.config import SansGPUError
from sansgpu.config.find import BUILT_IN
from sansgpu.config.wording import count
from sansgpu.jobs.plan import plan as plan_job
from sansgpu.planning.cluster import cluster_of
from sansgpu.planning.forecast import effective_tokens, expected_bits_per_byte
from sansgpu.planning.measure import MeasureRequest, measure_in_subprocess
from sansgpu.tasks.configuration import load_config
from tests.processes import (
    TINY,
    as_options,
    environment,
    events_of,
    finish,
    json_of,
    overrides,
    settings,
    use_cache,
    write_corpus,
)

pytestmark = pytest.mark.usefixtures("home")

# Keys of the JSON output on which other programs may rely.
PLAN_KEYS = {
    "parameters", "memory_bytes", "available_bytes", "fits", "batch_size", "gradient_accumulation_steps", "precision",
    "base_precision", "compile", "threads", "tokens_per_step", "tokens_per_second", "step_seconds", "total_steps",
    "total_seconds",
}  # fmt: skip
MEMORY_KEYS = {"weights", "gradients", "optimizer", "activations", "logits", "overhead", "total"}
BENCH_KEYS = {
    "parameters", "tokens_per_step", "step_seconds", "tokens_per_second", "steps_per_second", "flops_per_second", "mfu",
    "gemm_flops_per_second", "peak_rss_bytes", "build_seconds", "breakdown", "projections",
}  # fmt: skip
DOCTOR_KEYS = {
    "cores", "numa_nodes", "isa", "bf16_native", "memory_bytes", "available_bytes", "gemm_flops_per_second",
    "memory_bandwidth_bytes_per_second", "compiler", "advice",
}  # fmt: skip
GIGANTIC = {
    "model__d_model": 65536, "model__n_heads": 512, "model__d_ff": 1 << 18, "model__vocab_size": 1000,
    "training__max_steps": 5,
}  # fmt: skip


def fill(home: Path) -> None:
    write_corpus(home / "corpus.jsonl", documents=200)


def chosen(home: Path, **more: object) -> list[str]:
    return settings(data__dataset_name=home / "corpus.jsonl", **more)


def two_epochs(home: Path) -> list[str]:
    few = write_corpus(home / "few.jsonl", documents=30)
    return settings(data__dataset_name=few, training__num_epochs=2, training__max_steps="null")


def test_a_plan_says_what_is_promised(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = json_of(capsys, "plan", *two_epochs(home))
    assert plan.keys() >= PLAN_KEYS
    assert plan["memory_bytes"].keys() >= MEMORY_KEYS
    assert sum(v for k, v in plan["memory_bytes"].items() if k != "total") == plan["memory_bytes"]["total"]
    assert sum(plan["parameters_by_part"].values()) == plan["parameters"]
    assert plan["fits"]
    a_step = plan["total_tokens"] / plan["total_steps"]
    assert a_step <= plan["tokens_per_step"]
    assert plan["tokens_per_second"] == pytest.approx(a_step / plan["step_seconds"])
    assert plan["total_seconds"] > plan["total_steps"] * plan["step_seconds"]
    assert 0 < plan["machine_share"] < 2


def test_training_does_what_a_plan_says(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = json_of(capsys, "plan", *two_epochs(home))
    assert cli(["train", *two_epochs(home), "--output-dir", str(tmp_path / "r")]) == 0
    events = events_of(tmp_path / "r")
    start, end = events[0], events[-1]
    assert end["step"] == plan["total_steps"]
    assert events_of(tmp_path / "r", "step")[-1]["tokens"] == plan["total_tokens"]
    for key in ("parameters", "precision", "compile", "threads", "tokens_per_step", "gradient_accumulation_steps"):
        assert start[key] == plan[key]
    assert start["micro_batch"] == plan["batch_size"]
    assert start["memory_bytes"] == plan["memory_bytes"]


@pytest.mark.long
def test_what_takes_long_in_a_plan_is_shown(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache(monkeypatch, tmp_path / "cache")  # a new cache has no measurements
    shown: list[str] = []

    def progress(doing: str, done: int, total: int, unit: str = "byte", /) -> None:
        shown.append(doing)

    own = {"data.dataset_name": home / "corpus.jsonl", "training.compile": "off"}
    plan_job(None, overrides(TINY, own), progress, print, cluster_of(2, "10gbps", "50us", None))
    stages = list(dict.fromkeys(shown))
    step = re.compile(r"timing steps with micro-batches of \d+ examples?")
    timings = [stage for stage in stages if step.fullmatch(stage)]
    assert timings
    after = stages[stages.index(timings[0]) :]
    assert {"timing matrix products and memory", "timing gloo between two processes"} <= set(after)


@pytest.mark.parametrize("hours", [1, 0.5])
def test_a_plan_by_the_clock_tells_the_steps(home: Path, hours: float, capsys: pytest.CaptureFixture[str]) -> None:
    """They are those that fit at the speed of this plan, because a busy machine has another one at the next plan."""
    steps_alone = {"training__max_steps": "null", "training__eval_steps": 0, "training__save_steps": 0}
    plan = json_of(capsys, "plan", *chosen(home, training__max_hours=hours, **steps_alone))
    assert plan["total_seconds"] == pytest.approx(3600 * hours, rel=0.02)
    assert plan["total_steps"] * plan["step_seconds"] == pytest.approx(plan["total_seconds"], rel=0.05)


def test_what_does_not_fit_is_not_begun(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = chosen(home, **GIGANTIC)
    plan = json_of(capsys, "plan", *arguments)
    assert not plan["fits"]
    assert plan["tokens_per_second"] is None
    assert plan["total_steps"] == 5
    assert isinstance(plan["changes"], list)
    assert cli(["plan", *arguments]) == 0
    assert "does not fit" in capsys.readouterr().out
    assert cli(["train", *arguments, "--output-dir", str(tmp_path / "r")]) == 2
    error = capsys.readouterr().err
    assert "of memory, but" in error
    assert "--force starts it anyway" in error
    assert not (tmp_path / "r/config.yaml").exists()


def test_without_its_data_a_plan_goes_by_the_steps_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = settings(data__dataset_name=tmp_path / "missing.jsonl", data__vocab_size=512, training__max_steps=7)
    plan = json_of(capsys, "plan", *nowhere)
    assert plan["total_steps"] == 7
    assert plan["train_tokens"] is None
    assert cli(["plan", *nowhere]) == 0
    assert "the estimate below assumes random tokens" in capsys.readouterr().err
    epochs = settings(data__dataset_name=tmp_path / "missing.jsonl", training__num_epochs=1)
    assert cli(["plan", *epochs]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["small", "--hours", "1"], "replace small with --data"),
        (["--data", "notes"], "--data and --output require --hours"),
        (["--output", "x.yaml"], "--data and --output require --hours"),
        (["--presets", "--hours", "1"], "remove the configuration and --hours"),
        (["--hours", "1", "--set", "model.d_model=64"], "remove --set model.d_model=64"),
        (["--hours", "0"], "--hours is 0"),
    ],
)
def test_options_of_a_plan_that_do_not_go_together_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_preset_is_a_configuration(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = f"data.dataset_name={home / 'corpus.jsonl'}"
    tiny = ["model.d_model=32", "model.n_heads=2", "model.n_layers=1", "model.d_ff=32", "model.vocab_size=null"]
    less = as_options([data, "data.vocab_size=300", *tiny])
    assert cli(["train", "small", *less, "--max-steps", "1", "--output-dir", str(tmp_path / "r")]) == 0
    assert (tmp_path / "r/final/model.safetensors").exists()


@pytest.fixture(scope="module")
def bench(home: Path) -> dict[str, Any]:
    """Runs a bench in the folder `home / "bench"` and returns its measurements."""
    arguments = ["bench", *chosen(home), "--steps", "3", "--no-what-if", "--output-dir", str(home / "bench"), "--json"]
    with redirect_stdout(io.StringIO()) as out:
        assert cli([*arguments, "--from-step", "50", "--gpu-tflops", "100"]) == 0
    result: dict[str, Any] = json.loads(out.getvalue())
    return result


@pytest.mark.long
def test_bench_measures_what_is_promised(bench: dict[str, Any]) -> None:
    assert bench.keys() >= BENCH_KEYS
    assert bench["build_seconds"].keys() == {"data", "tokenizer", "model", "compile"}
    assert bench["breakdown"].keys() == {"attention", "matmul", "loss", "optimizer", "other"}
    assert sum(bench["breakdown"].values()) == pytest.approx(1, abs=0.05)
    step = bench["step_seconds"]
    assert 0 < step["min"] <= step["median"] <= step["max"]
    assert bench["tokens_per_second"] == pytest.approx(bench["tokens_per_step"] / step["median"])


@pytest.mark.long
def test_bench_projects_the_time_of_many_steps_and_of_a_gpu(bench: dict[str, Any]) -> None:
    assert [p["steps"] for p in bench["projections"]][:3] == [100, 150, 300]
    seconds = [p["seconds"] for p in bench["projections"]]
    assert seconds == sorted(seconds)
    assert all(p["seconds_from_snapshot"] < p["seconds"] for p in bench["projections"])
    assert bench["gpu"]["estimate"]


@pytest.mark.long
@pytest.mark.usefixtures("bench")
def test_bench_writes_reports(home: Path) -> None:
    report = (home / "bench/report.md").read_text()
    assert "A step is one optimizer update" in report
    assert "This is an estimate" in report
    page = (home / "bench/report.html").read_text()
    assert page.count("<figure ") == 3
    assert "://" not in re.sub("<script.*?</script>", "", page, flags=re.DOTALL)
    assert "<script src" not in page


@pytest.mark.long
@pytest.mark.usefixtures("bench")
def test_what_bench_writes_runs(home: Path, tmp_path: Path) -> None:
    config, _ = load_config(home / "bench/optimized.yaml")
    assert config.training.batch_size != "auto"
    done = subprocess.run(
        [home / "bench/start.sh", "--max-steps", "2"], cwd=tmp_path, env=environment(home / "cache"),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "runs").glob("*/final/model.safetensors"))


@pytest.mark.long
def test_a_measurement_that_fails_is_one_sentence_and_no_traceback() -> None:
    beyond_any_machine = {"model__d_model": 1 << 24, "model__n_heads": 1 << 18, "model__d_ff": 1 << 24}
    other = {"training__optimizer": "adamw", "model__vocab_size": 1000}
    config, _ = load_config(None, overrides(TINY, other, beyond_any_machine))
    with pytest.raises(SansGPUError, match=r"^the measurement failed: .*\.$"):
        measure_in_subprocess(MeasureRequest(config, 1))


@pytest.mark.long
def test_bench_of_the_model_alone_needs_no_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = settings(data__dataset_name=tmp_path / "missing.jsonl", data__vocab_size=512, training__max_steps=7)
    short = ("--forward-only", "--steps", "3", "--output-dir", tmp_path / "b")
    result = json_of(capsys, "bench", *arguments, *short)
    assert {row["batch_size"] for row in result["forward"]} >= {1}
    assert all(row["tokens_per_second"] > 0 for row in result["forward"])


@pytest.mark.long
def test_bench_measures_variations_with_what_if(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", *chosen(home), "--steps", "3", "--what-if", "--output-dir", str(tmp_path / "bench")]
    result = json_of(capsys, *arguments)
    names = [row["name"] for row in result["what_if"]]
    assert names[0] == "unchanged"
    assert {"half the sequence length", "half the layers", "half the width"} <= set(names)
    for row in result["what_if"]:
        low, high = row["speedup_range"]
        assert 0 < low <= row["speedup"] <= high
    report = (tmp_path / "bench/report.md").read_text()
    assert "x in 4 steps)" in report


@pytest.mark.long
def test_a_proposal_is_written_and_runs(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "proposed.yaml"
    arguments = ["plan", "--hours", "0.01", "--data", str(home / "corpus.jsonl"), "--output", str(output)]
    result = json_of(capsys, *arguments)
    assert min(row["behind"] for row in result["candidates"]) == 0
    assert yaml.safe_load(output.read_text())["training"]["max_hours"] == 0.01
    head = " ".join(line.removeprefix("# ") for line in output.read_text().splitlines() if line.startswith("# "))
    assert f"{result['total_steps']:,} steps, {count(result['total_tokens'])} tokens, " in head
    assert cli(arguments) == 2
    assert "already exists" in capsys.readouterr().err
    assert cli(["train", str(output), "--output-dir", str(tmp_path / "r")]) == 0
    events = events_of(tmp_path / "r")
    assert events[-1]["seconds"] <= 36


def test_doctor_says_what_is_promised(capsys: pytest.CaptureFixture[str]) -> None:
    result = json_of(capsys, "doctor")
    assert result.keys() >= DOCTOR_KEYS
    assert result["gemm_flops_per_second"].keys() == {"fp32", "bf16", "int16", "int8"}
    assert result["memory_bandwidth_bytes_per_second"] > 1e8
    gains = [advice["gain"] for advice in result["advice"]]
    assert gains == sorted(gains, reverse=True)
    assert cli(["doctor"]) == 0
    assert "GFLOP/s" in capsys.readouterr().out


@pytest.mark.long
def test_doctor_finds_what_slows_a_run_down(home: Path) -> None:
    slowed = {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    code, out, error = finish(["doctor", "--json"], home / "cache", **slowed)
    assert code == 0, error
    advice = " ".join(item["text"] for item in json.loads(out)["advice"])
    assert "unset ONEDNN_MAX_CPU_ISA=AVX2" in advice


def test_repeated_text_is_worth_less_and_a_larger_model_wants_more_of_it() -> None:
    assert effective_tokens(5e6, 10e6) == 5e6
    assert 10e6 < effective_tokens(20e6, 10e6) < 20e6
    assert effective_tokens(1e12, 10e6) < 17 * 10e6
    assert expected_bits_per_byte(2e6, 20e6, 1e9) < expected_bits_per_byte(2e6, 10e6, 1e9)
    assert expected_bits_per_byte(4e6, 10e6, 1e9) < expected_bits_per_byte(2e6, 10e6, 1e9)


def test_the_built_in_length_gives_way_to_one_that_is_asked_for() -> None:
    assert load_config()[0].training.max_steps == BUILT_IN["training"]["max_steps"]
    assert load_config(None, ["training.max_hours=1"])[0].training.max_steps is None
    assert load_config(None, ["training.until=07:00"])[0].training.max_steps is None
    assert load_config(None, ["training.max_steps=3", "training.max_hours=1"])[0].training.max_steps == 3
    assert load_config(None, ["training.learning_rate=0.1"])[0].training.max_steps == 500
