"""CPUs, threads, memory and grace periods of the pods that `k8s` writes."""

import json

import pytest

from sansgpu.cli import run as cli
from sansgpu.jobs.k8s import ClusterRequest, kubernetes
from sansgpu.machine.measurements import ASSUMED_FLOPS_PER_SECOND
from sansgpu.machine.probe import available_cores
from sansgpu.tasks.configuration import load_config
from sansgpu.tasks.registry import TASKS
from sansgpu.train.run_length import DISK_BYTES_PER_SECOND
from tests.jobs.k8s.rendered import CONFIG, OWN_RUNTIME, ROOT, refused, render

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_pods_have_the_guaranteed_quality_of_service() -> None:
    rendered = render(OWN_RUNTIME)
    containers = [container for pod in rendered.pods for container in pod["containers"]]
    assert len(containers) == 3
    assert not any("initContainers" in pod for pod in rendered.pods)
    for resources in [*(c["resources"] for c in containers), rendered.trainer["resourcesPerNode"]]:
        assert resources["requests"] == resources["limits"]
        assert resources["limits"].keys() == {"cpu", "memory"}
        assert resources["limits"]["cpu"].isdigit()  # the static CPU manager needs an integer
    for resources in (rendered.container["resources"], rendered.trainer["resourcesPerNode"]):
        assert resources["limits"] == {"cpu": "16", "memory": "64Gi"}


@pytest.mark.parametrize(
    ("cpus", "processes", "threads"),
    [(1, 1, 1), (2, 1, 2), (2, 2, 1), (8, 1, 8), (16, 1, 16), (17, 2, 8), (64, 4, 16)],
)
def test_processes_share_the_cpus_of_a_pod(cpus: int, processes: int, threads: int) -> None:
    rendered = render(OWN_RUNTIME, nodes=1, cpus=cpus, processes_per_node=processes)
    assert rendered.env["OMP_NUM_THREADS"] == str(threads)
    assert rendered.elastic["nprocPerNode"] == str(processes)  # Training Operator requires a string
    assert rendered.trainer["numProcPerNode"] == processes  # Trainer requires a number
    assert rendered.trainer["env"] == rendered.container["env"]


def test_a_pod_uses_as_many_threads_as_plan_chooses_for_its_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    config = ROOT / "configs/tiny.yaml"
    assert cli(["plan", str(config), "--set", f"data.dataset_name={ROOT / 'docs'}", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["threads"]
    assert render(config=config, nodes=1, cpus=available_cores()).env["OMP_NUM_THREADS"] == str(planned)


def test_configured_threads_are_used_if_there_are_enough_cpus(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rendered = render("--set", "training.threads=8", nodes=2, processes_per_node=2)
    assert rendered.env["OMP_NUM_THREADS"] == "8"
    line = refused(capsys, "--set", "training.threads=9", nodes=2, processes_per_node=2)
    assert "9 threads in each of 2 processes, but --cpus is 16" in line


def test_the_grace_period_exceeds_a_step_and_its_snapshots() -> None:
    config = TASKS["pretrain"].with_vocabulary(load_config(CONFIG)[0])
    costs = TASKS["pretrain"].costs(config)
    snapshot = 12 * sum(costs.parameters().values())  # weights and two moments in fp32
    step = costs.work(4 * 512).needed / (16 * ASSUMED_FLOPS_PER_SECOND["fp32"])
    rendered = render()
    graces = {pod["terminationGracePeriodSeconds"] for pod in rendered.training_pods}
    assert len(graces) == 1
    [grace] = graces
    needed = step + 2 * snapshot / DISK_BYTES_PER_SECOND
    assert needed + 30 < grace < needed + 60
    # By default torchrun kills its processes after 30 seconds, whatever the pod's grace period is.
    assert needed + 20 < int(rendered.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < grace
    larger = render("--set", "model.d_model=2304", "--set", "model.n_heads=36")
    assert larger.training_pods[0]["terminationGracePeriodSeconds"] > 2 * grace
    longer = render("--set", "training.gradient_accumulation_steps=4000", cpus=2)
    assert longer.training_pods[0]["terminationGracePeriodSeconds"] > 10 * grace


def test_the_size_of_an_unavailable_model_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    rendered = render("--set", "model.name_or_path=/data/models/base", config=ROOT / "configs/sft.yaml")
    assert "the time to save a snapshot is estimated for a model of 1B parameters" in capsys.readouterr().err
    assert rendered.training_pods[0]["terminationGracePeriodSeconds"] > 2 * 12e9 / DISK_BYTES_PER_SECOND


def test_insufficient_memory_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    render(memory="2Gi")
    assert "each process needs about" in capsys.readouterr().err
    render(memory="8Gi")
    assert "warning" not in capsys.readouterr().err
    render(memory="8Gi", nodes=1, processes_per_node=4)
    assert "each process needs about" in capsys.readouterr().err


def test_slow_stages_are_reported_as_progress() -> None:
    shown: list[str] = []

    def progress(doing: str, done: int, total: int, unit: str = "byte", /) -> None:
        shown.append(doing)

    request = ClusterRequest(
        CONFIG, (), nodes=4, cpus=16, memory="64Gi", pvc="corpus", image="registry.example/sansgpu:1"
    )
    kubernetes(request, progress, shown.append)
    assert shown == ["estimating memory and the time to save a snapshot"]
