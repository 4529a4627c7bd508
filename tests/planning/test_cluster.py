"""`sansgpu plan --nodes` estimates time, memory and cost on a cluster."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from sansgpu.cli import run as cli
from tests.processes import settings, write_corpus

pytestmark = pytest.mark.usefixtures("home")

CLUSTER_KEYS = {
    "nodes", "network_bits_per_second", "latency_seconds", "gloo_bytes_per_second", "gradient_bytes", "step_seconds",
    "compute_seconds", "communication_seconds", "overlapped_seconds", "tokens_per_second", "efficiency",
    "total_seconds", "node_hours", "cost", "fits", "memory_bytes", "most_nodes", "pays_until", "fastest_nodes",
    "critical_batch_tokens", "curve",
}  # fmt: skip
ROW_KEYS = {
    "nodes", "step_seconds", "tokens_per_second", "speed_up", "efficiency", "total_seconds", "node_hours", "cost",
}  # fmt: skip
LONG = {"training__max_steps": 300, "training__gradient_accumulation_steps": 8}


def fill(home: Path) -> None:
    write_corpus(home / "corpus.jsonl", documents=200)


def planned(home: Path, *arguments: str, **more: object) -> dict[str, Any]:
    chosen = settings(data__dataset_name=home / "corpus.jsonl", **more)
    with redirect_stdout(io.StringIO()) as out:
        assert cli(["plan", *chosen, *arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(out.getvalue())
    return result


@pytest.fixture(scope="module")
def plan(home: Path) -> dict[str, Any]:
    """Returns the plan of a run on four nodes."""
    return planned(home, "--nodes", "4", "--network", "1gbps", "--price", "0.40", **LONG)


@pytest.fixture
def cluster(plan: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = plan["cluster"]
    return found


def test_a_plan_for_a_cluster_has_the_promised_keys(cluster: dict[str, Any]) -> None:
    assert cluster.keys() >= CLUSTER_KEYS
    assert all(row.keys() >= ROW_KEYS for row in cluster["curve"])
    assert cluster["fits"]
    assert cluster["memory_bytes"]["total"] > 0


def test_a_step_takes_the_time_of_computation_and_exposed_communication(
    plan: dict[str, Any], cluster: dict[str, Any]
) -> None:
    assert (cluster["nodes"], cluster["network_bits_per_second"], cluster["latency_seconds"]) == (4, 1e9, 50e-6)
    assert cluster["gradient_bytes"] == 4 * plan["parameters"]
    assert cluster["gloo_bytes_per_second"] > 1e6
    sent = cluster["communication_seconds"] - cluster["overlapped_seconds"]
    assert cluster["step_seconds"] == pytest.approx(cluster["compute_seconds"] + sent)


def test_the_curve_has_times_up_to_one_node_per_example(cluster: dict[str, Any]) -> None:
    curve = cluster["curve"]
    assert [row["nodes"] for row in curve] == [1 << n for n in range(11)]
    assert cluster["most_nodes"] == 16
    assert [row["step_seconds"] is None for row in curve] == [row["nodes"] > 16 for row in curve]
    assert {key: curve[2][key] for key in ROW_KEYS} == {key: cluster[key] for key in ROW_KEYS}
    fastest = min(curve[:5], key=lambda row: row["step_seconds"])
    assert cluster["fastest_nodes"] == fastest["nodes"]
    assert cluster["pays_until"] <= 16


def test_one_node_takes_as_long_as_the_plan_without_nodes(plan: dict[str, Any], cluster: dict[str, Any]) -> None:
    alone = cluster["curve"][0]
    for key in ("step_seconds", "tokens_per_second", "total_seconds"):
        assert alone[key] == pytest.approx(plan[key])
    assert alone["speed_up"] == alone["efficiency"] == 1


def test_cost_is_the_price_of_the_node_hours(cluster: dict[str, Any]) -> None:
    for row in cluster["curve"][:5]:
        assert row["node_hours"] == pytest.approx(row["nodes"] * row["total_seconds"] / 3600)
        assert row["cost"] == pytest.approx(0.4 * row["node_hours"])


def test_a_batch_that_grows_with_the_nodes_is_more_efficient(plan: dict[str, Any], cluster: dict[str, Any]) -> None:
    grown = cluster["grown_batch"]
    assert grown["tokens_per_step"] == 4 * plan["tokens_per_step"]
    assert grown["tokens_per_second"] == pytest.approx(4 * plan["tokens_per_second"] * grown["efficiency"])
    assert cluster["efficiency"] < grown["efficiency"] < 1
    assert 0 < cluster["critical_batch_loss"] < 5.8  # ln 300 = 5.7 is the loss of uniform guessing


@pytest.mark.long
def test_sharding_reduces_memory_per_node_and_max_hours_fixes_the_time(home: Path) -> None:
    more = {"training__max_hours": 1, "training__max_steps": "null", "training__sharding": "optimizer"}
    wide = {"model__d_model": 256, "training__optimizer": "adamw", "training__gradient_reduction": "bf16"}
    plan = planned(home, "--nodes", "2", "--latency", "0.2ms", **more, **wide)
    cluster = plan["cluster"]
    assert cluster["latency_seconds"] == pytest.approx(200e-6)
    assert cluster["network_bits_per_second"] == 10e9
    assert cluster["cost"] is None
    assert cluster["gradient_bytes"] == 2 * plan["parameters"]
    assert cluster["memory_bytes"]["optimizer"] == pytest.approx(plan["memory_bytes"]["optimizer"] / 2, abs=1)
    for row in cluster["curve"][:3]:
        assert row["total_seconds"] == pytest.approx(3600, rel=0.02)
        assert 600 < row["total_steps"] * row["step_seconds"] < 3600


@pytest.mark.long
def test_the_plan_of_a_cluster_fits_in_80_columns(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    capsys.readouterr()
    arguments = settings(data__dataset_name=home / "corpus.jsonl", **LONG)
    assert cli(["plan", *arguments, "--nodes", "2", "--price", "1.5"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "…" not in said
    assert "2 nodes" in said
    assert "more than 16 nodes are not possible" in said
    assert "which cost" in " ".join(said.split())
    assert "are the fastest" in " ".join(said.split())
    assert "with a batch 2 times as large" in " ".join(said.split())
    assert "critical batch size" in " ".join(said.split())


def test_a_plan_without_nodes_has_no_cluster(home: Path) -> None:
    assert "cluster" not in planned(home, training__max_steps=10)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nodes", "0"], "'--nodes'"),
        (["--nodes", "two"], "'--nodes'"),
        (
            ["--nodes", "5"],
            "a step has 4 examples, and each node needs at least one; raise training.gradient_accumulation",
        ),
        (
            ["--nodes", "2", "--network", "fast"],
            "--network is 'fast'; write a positive number with a unit, e.g. 10gbps",
        ),
        (["--nodes", "2", "--network", "10"], "--network is '10'"),
        (["--nodes", "2", "--network", "0gbps"], "--network is '0gbps'"),
        (["--nodes", "2", "--network", "-1gbps"], "--network is '-1gbps'"),
        (["--nodes", "2", "--network", "1e3mbit"], "--network is '1e3mbit'"),
        (["--nodes", "2", "--latency", "soon"], "--latency is 'soon'; write a positive number with a unit, e.g. 50us"),
        (["--nodes", "2", "--latency", "1gbps"], "--latency is '1gbps'"),
        (["--nodes", "2", "--price", "-1"], "'--price'"),
        (["--network", "1gbps"], "--network, --latency and --price require --nodes"),
        (["--latency", "1ms"], "--network, --latency and --price require --nodes"),
        (["--price", "1"], "--network, --latency and --price require --nodes"),
    ],
)
def test_invalid_cluster_options_are_refused(
    arguments: list[str], said: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["plan", *settings(data__dataset_name=home / "corpus.jsonl"), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("others", [["--presets"], ["--hours", "1"]])
def test_nodes_require_a_single_configuration(others: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["plan", "--nodes", "2", *others]) == 2
    assert "--nodes plans a single configuration" in capsys.readouterr().err
