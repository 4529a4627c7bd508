"""`k8s`, from the command line: what is written is what the published schemas of Kubeflow and Kubernetes allow."""

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubeflow_trainer_api.models as trainer
import pytest
import torch
import yaml
from kubeflow.training import ApiClient

from sansgpu import __version__
from sansgpu.cli import run as cli
from sansgpu.config import load_config
from sansgpu.jobs.k8s.manifests import LIBIOMP, TCMALLOC, USER
from sansgpu.machine.compilation import EAGER_FLOPS_PER_SECOND
from sansgpu.tasks import TASKS
from sansgpu.train.budget import DISK_BYTES_PER_SECOND
from tests.processes import environment, settings, write_corpus

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/cpu_80m.yaml"
OPTIONS = {"nodes": 4, "cpus": 16, "memory": "64Gi", "pvc": "corpus", "image": "registry.example/sansgpu:1"}
MODELS = {
    "ConfigMap": trainer.IoK8sApiCoreV1ConfigMap,
    "Pod": trainer.IoK8sApiCoreV1Pod,
    "TrainingRuntime": trainer.TrainerV1alpha1TrainingRuntime,
    "TrainJob": trainer.TrainerV1alpha1TrainJob,
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def arguments(*more: str, config: Path = CONFIG, **options: object) -> list[str]:
    merged = {**OPTIONS, **options}
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in merged.items() if value is not None]
    return ["k8s", str(config), *(part for pair in pairs for part in pair), *more]


class Rendered:
    """What one command wrote."""

    def __init__(self, folder: Path) -> None:
        self.texts = {path.name: path.read_text() for path in folder.iterdir()}
        files = {name: list(yaml.safe_load_all(text)) for name, text in self.texts.items() if name.endswith(".yaml")}
        self.by_file = files
        self.objects = {o["kind"]: o for objects in files.values() for o in objects}
        self.dockerfile = self.texts["Dockerfile"]
        self.elastic = self.objects["PyTorchJob"]["spec"]
        self.worker = self.elastic["pytorchReplicaSpecs"]["Worker"]
        self.runtime = self.objects["TrainingRuntime"]["spec"]
        self.trainer = self.objects["TrainJob"]["spec"]["trainer"]
        [self.node] = self.runtime["template"]["spec"]["replicatedJobs"]
        self.training_pods = [self.worker["template"]["spec"], self.node["template"]["spec"]["template"]["spec"]]
        self.pods = [*self.training_pods, self.objects["Pod"]["spec"]]
        [self.container] = self.training_pods[0]["containers"]
        self.env = {pair["name"]: pair["value"] for pair in self.container["env"]}


def render(*more: str, **options: object) -> Rendered:
    assert cli(arguments(*more, output_dir="out", **options)) == 0
    return Rendered(Path("out"))


def refused(capsys: pytest.CaptureFixture[str], *more: str, **options: object) -> str:
    """The one sentence, with nothing written."""
    capsys.readouterr()
    before = sorted(Path().rglob("*"))
    assert cli(arguments(*more, **options)) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    [line] = captured.err.splitlines()
    assert line.startswith("sansgpu: ")
    assert sorted(Path().rglob("*")) == before
    return line


def as_its_schema_has_it(manifest: dict[str, Any]) -> Any:
    """The object, read and written again by its published model, which leaves out what it does not know."""
    if manifest["kind"] == "PyTorchJob":
        client = ApiClient()
        read = client.deserialize(SimpleNamespace(data=json.dumps(manifest)), "KubeflowOrgV1PyTorchJob")
        return client.sanitize_for_serialization(read)
    read = MODELS[manifest["kind"]].from_dict(manifest)
    assert read is not None
    return json.loads(json.dumps(read.to_dict()))


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--namespace", "research", "--name", "trial-7", "--min-nodes", "2", "--processes-per-node", "2"),
        ("--node-selector", "kubernetes.io/arch=amd64", "--node-selector", "pool=cpu", "--openmp", "libiomp"),
        ("--allocator", "none", "--set", "training.report_to=none"),
    ],
)
def test_every_object_is_what_its_schema_allows(options: tuple[str, ...]) -> None:
    rendered = render(*options)
    assert {k: [o["kind"] for o in v] for k, v in rendered.by_file.items()} == {
        "pytorchjob.yaml": ["ConfigMap", "PyTorchJob"],
        "trainjob.yaml": ["ConfigMap", "TrainingRuntime", "TrainJob"],
        "files.yaml": ["Pod"],
    }
    for manifest in rendered.objects.values():
        assert as_its_schema_has_it(manifest) == manifest


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("PyTorchJob", ("spec", "elasticPolicy", "minReplica")),
        ("PyTorchJob", ("spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "terminationGracePeriod")),
        ("PyTorchJob", ("spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "containers", 0, "workDir")),
        ("TrainJob", ("spec", "trainer", "numProcsPerNode")),
        ("TrainingRuntime", ("spec", "mlPolicy", "torch", "numProcPerNode")),  # Trainer 2.3 has it no more
        ("TrainingRuntime", ("spec", "template", "spec", "failurePolicy", "maxRestart")),
        ("Pod", ("spec", "securityContext", "fsgroup")),
        ("ConfigMap", ("datas",)),
    ],
)
def test_a_misspelt_field_would_be_noticed(kind: str, path: tuple[Any, ...]) -> None:
    manifest = render().objects[kind]
    inner = manifest
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = 1
    assert as_its_schema_has_it(manifest) != manifest


def test_pods_are_guaranteed() -> None:
    rendered = render()
    containers = [container for pod in rendered.pods for container in pod["containers"]]
    assert len(containers) == 3
    assert not any("initContainers" in pod for pod in rendered.pods)
    for resources in [*(c["resources"] for c in containers), rendered.trainer["resourcesPerNode"]]:
        assert resources["requests"] == resources["limits"]
        assert resources["limits"].keys() == {"cpu", "memory"}
        assert resources["limits"]["cpu"].isdigit()  # whole, so that a static CPU manager gives cores
    for resources in (rendered.container["resources"], rendered.trainer["resourcesPerNode"]):
        assert resources["limits"] == {"cpu": "16", "memory": "64Gi"}


@pytest.mark.parametrize(
    ("cpus", "processes", "threads"),
    [(1, 1, 1), (2, 1, 1), (2, 2, 1), (8, 1, 7), (16, 1, 15), (16, 2, 7), (17, 1, 15), (64, 2, 31), (64, 4, 15)],
)
def test_threads_leave_some_cpus_to_others(cpus: int, processes: int, threads: int) -> None:
    rendered = render(cpus=cpus, processes_per_node=processes)
    assert rendered.env["OMP_NUM_THREADS"] == str(threads)
    assert rendered.elastic["nprocPerNode"] == str(processes)  # Training Operator wants a string
    assert rendered.trainer["numProcPerNode"] == processes  # and Trainer a number
    assert rendered.trainer["env"] == rendered.container["env"]


def test_threads_of_the_configuration_are_kept_where_there_are_cpus_for_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rendered = render("--set", "training.threads=8", processes_per_node=2)
    assert rendered.env["OMP_NUM_THREADS"] == "8"
    line = refused(capsys, "--set", "training.threads=9", processes_per_node=2)
    assert "9 threads in each of 2 processes, but --cpus is 16" in line


@pytest.mark.parametrize(
    ("allocator", "openmp", "preloaded"),
    [
        ("tcmalloc", "libgomp", [TCMALLOC]),
        ("tcmalloc", "libiomp", [TCMALLOC, LIBIOMP]),
        ("none", "libiomp", [LIBIOMP]),
        ("none", "libgomp", []),
    ],
)
def test_what_is_preloaded_is_in_the_image(allocator: str, openmp: str, preloaded: list[str]) -> None:
    rendered = render(allocator=allocator, openmp=openmp)
    assert rendered.env.get("LD_PRELOAD", "").split(":") == (preloaded or [""])
    assert ("KMP_BLOCKTIME" in rendered.env) == (openmp == "libiomp")
    assert not [name for name in rendered.env if name.startswith("GOMP")]  # what matters is set by `set_openmp_spin`
    for library in (TCMALLOC, LIBIOMP):
        assert (library in rendered.dockerfile) == (library in preloaded)
    assert ("libtcmalloc-minimal4" in rendered.dockerfile) == (allocator == "tcmalloc")
    pinned = re.search(r"intel-openmp==\d+\.\d+\.\d+", rendered.dockerfile)
    assert (pinned is not None) == (openmp == "libiomp")


TRAIN = "torchrun -m sansgpu train /etc/sansgpu/config.yaml --output-dir /data/runs/{} --resume latest --headless"


def test_a_pytorchjob_is_elastic() -> None:
    rendered = render(min_nodes=2)
    job = rendered.elastic
    assert rendered.objects["PyTorchJob"]["apiVersion"] == "kubeflow.org/v1"
    assert job["elasticPolicy"].items() >= {"rdzvBackend": "c10d", "minReplicas": 2, "maxReplicas": 4}.items()
    assert job["elasticPolicy"]["maxRestarts"] > 0
    assert "nProcPerNode" not in job["elasticPolicy"]  # deprecated, and refused beside spec.nprocPerNode
    assert job["pytorchReplicaSpecs"].keys() == {"Worker"}
    assert (rendered.worker["replicas"], rendered.worker["restartPolicy"]) == (4, "OnFailure")
    assert rendered.container["name"] == "pytorch"
    assert rendered.container["command"] == TRAIN.format("cpu-80m").split()
    assert job["runPolicy"]["cleanPodPolicy"] == "None"  # its pods stay, and their logs
    assert "ttlSecondsAfterFinished" not in job["runPolicy"]
    assert job["runPolicy"]["backoffLimit"] >= 4


def test_a_trainjob_has_a_runtime_of_its_own() -> None:
    rendered = render("--name", "trial")
    job, runtime = rendered.objects["TrainJob"], rendered.objects["TrainingRuntime"]
    assert job["apiVersion"] == runtime["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    assert job["spec"]["runtimeRef"] == reference
    assert runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] == "torch"
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 4, "torch": {}}
    assert (rendered.trainer["numNodes"], rendered.trainer["numProcPerNode"]) == (4, 1)
    assert rendered.trainer["command"] == TRAIN.format("trial").split()
    assert not [pair for pair in rendered.trainer["env"] if pair["name"].startswith("PET_")]  # reserved
    node = rendered.node
    assert node["name"] == "node"
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    [container] = node["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node"
    assert container["image"] == rendered.trainer["image"] == OPTIONS["image"]


def test_a_lost_pod_begins_a_trainjob_anew_and_is_no_failure() -> None:
    rendered = render()
    policy = rendered.runtime["template"]["spec"]["failurePolicy"]
    assert policy["maxRestarts"] > 0
    [rule] = policy["rules"]
    assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])  # as JobSet wants it
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])
    job = rendered.node["template"]["spec"]
    assert job["backoffLimit"] == 0
    assert job["podFailurePolicy"]["rules"][0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # which a podFailurePolicy needs


def test_all_that_lasts_is_on_the_claim() -> None:
    rendered = render()
    for pod in rendered.pods:
        [container] = pod["containers"]
        volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
        assert volumes["data"] == {"persistentVolumeClaim": {"claimName": "corpus"}}
        assert {"name": "data", "mountPath": "/data"} in container["volumeMounts"]
        assert container["workingDir"] == "/data"
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        if pod in rendered.training_pods:
            places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert volumes["shared-memory"] == {"emptyDir": {"medium": "Memory", "sizeLimit": f"{64 * 1024 // 8}Mi"}}
            assert volumes["temporary"]["emptyDir"].keys() == {"sizeLimit"}
            assert volumes["config"] == {"configMap": {"name": "cpu-80m"}}
            assert places["shared-memory"] == "/dev/shm"
            assert places["temporary"] == "/tmp"
            assert places["config"] == "/etc/sansgpu"
    places = {"SANSGPU_CACHE": "/data/cache", "HF_HOME": "/data/hub", "HOME": "/tmp", "PYTHONUNBUFFERED": "1"}
    assert rendered.env.items() >= places.items()
    assert "GLOO_SOCKET_IFNAME" not in rendered.env


def test_pods_are_found_by_the_runs_label_and_have_no_proxy_beside_them() -> None:
    rendered = render()
    files = rendered.objects["Pod"]["metadata"]["labels"]
    for template in (rendered.worker["template"], rendered.node["template"]["spec"]["template"]):
        labels = template["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "cpu-80m"
        assert labels["sidecar.istio.io/inject"] == "false"
        [spread] = template["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
        assert not spread["labelSelector"]["matchLabels"].items() <= files.items()
    assert "app.kubernetes.io/instance" not in files  # else its pod were among the logs


def test_pods_can_do_no_harm() -> None:
    rendered = render()
    for pod in rendered.pods:
        assert pod["automountServiceAccountToken"] is False
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["runAsGroup"] == security["fsGroup"] == USER
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["containers"][0]["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_the_configuration_in_the_map_is_the_one_that_was_given() -> None:
    changes = ("training.max_steps=7", "data.dataset_name=notes/", "training.report_to=[tensorboard]")
    rendered = render(*(part for change in changes for part in ("--set", change)))
    Path("config.yaml").write_text(rendered.objects["ConfigMap"]["data"]["config.yaml"])
    assert load_config(Path("config.yaml"))[0] == load_config(CONFIG, changes)[0]
    assert rendered.by_file["pytorchjob.yaml"][0] == rendered.by_file["trainjob.yaml"][0]


def test_names_and_nodes_are_as_asked_for() -> None:
    rendered = render("--node-selector", "pool=cpu", namespace="research", name="trial")
    for manifest in rendered.objects.values():
        assert manifest["metadata"]["namespace"] == "research"
        assert manifest["metadata"]["name"] == ("trial-files" if manifest["kind"] == "Pod" else "trial")
    for pod in rendered.pods:
        assert pod["nodeSelector"] == {"pool": "cpu"}
    assert "namespace" not in render().objects["TrainJob"]["metadata"]
    assert all("nodeSelector" not in pod for pod in render().pods)


@pytest.mark.parametrize(
    ("stem", "name"), [("cpu_80m", "cpu-80m"), ("Ünï çode.v2", "n-ode-v2"), ("7b", "run-7b"), ("x" * 90, "x" * 45)]
)
def test_a_runs_name_is_made_of_its_configurations(stem: str, name: str) -> None:
    config = Path(f"{stem}.yaml")
    config.write_text(CONFIG.read_text())
    assert cli(arguments(config=config)) == 0
    rendered = Rendered(Path("k8s") / stem)
    assert {m["metadata"]["name"] for k, m in rendered.objects.items() if k != "Pod"} == {name}


def test_pods_have_longer_to_save_than_a_step_and_its_snapshots_take() -> None:
    config = TASKS["pretrain"].with_vocabulary(load_config(CONFIG)[0])
    snapshot = 12 * sum(TASKS["pretrain"].parameters(config).values())  # weights and two moments in fp32
    step = TASKS["pretrain"].work(config, 4 * 512).needed / (15 * EAGER_FLOPS_PER_SECOND["fp32"])
    rendered = render()
    graces = {pod["terminationGracePeriodSeconds"] for pod in rendered.training_pods}
    assert len(graces) == 1
    [grace] = graces
    needed = step + 2 * snapshot / DISK_BYTES_PER_SECOND
    assert needed + 30 < grace < needed + 60
    # torchrun gives its processes 30 seconds, whatever the pod has.
    assert needed + 20 < int(rendered.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < grace
    larger = render("--set", "model.d_model=2304", "--set", "model.n_heads=36")
    assert larger.training_pods[0]["terminationGracePeriodSeconds"] > 2 * grace
    longer = render("--set", "training.gradient_accumulation_steps=4000", cpus=2)
    assert longer.training_pods[0]["terminationGracePeriodSeconds"] > 10 * grace


def test_of_a_model_that_is_not_here_a_size_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    rendered = render("--set", "model.name_or_path=/data/models/base", config=ROOT / "configs/sft.yaml")
    assert "the grace period of pods assumes a model of 1B parameters" in capsys.readouterr().err
    assert rendered.training_pods[0]["terminationGracePeriodSeconds"] > 2 * 12e9 / DISK_BYTES_PER_SECOND


def test_memory_that_will_not_do_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    render(memory="2Gi")
    assert "each process needs about" in capsys.readouterr().err
    render(memory="8Gi")
    assert capsys.readouterr().err == ""
    render(memory="8Gi", processes_per_node=4)
    assert "each process needs about" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": 0}, "--nodes"),
        ({"nodes": "some"}, "--nodes"),
        ({"min_nodes": 5}, "--min-nodes 5 is greater than --nodes 4"),
        ({"cpus": 0}, "--cpus"),
        ({"cpus": 1.5}, "--cpus"),
        ({"processes_per_node": 17}, "17 processes share 16 CPUs"),
        ({"memory": "64GB"}, "is not a Kubernetes quantity; write e.g. 64Gi"),
        ({"memory": "lots"}, "is not a Kubernetes quantity; write e.g. 64Gi"),
        ({"memory": "-64Gi"}, "is not a Kubernetes quantity; write e.g. 64Gi"),
        ({"memory": "64"}, "64 is 64 bytes, too little"),
        *(
            ({"memory": text}, "is not a Kubernetes quantity")
            for text in (
                "inf",
                "nan",
                "1e999Gi",
                "9" * 400,
                "9223372036854775808",
                "8Ei",
                "1e99",
                "64Gib",
                "64 Gi",
                "64Gi\n",
                "٦٤Gi",
                "0x10Gi",
                "1_000Mi",
                ".Gi",
                "",
            )
        ),
        *(
            ({"image": name}, "is not a valid image reference")
            for name in (
                "../x",
                "./x",
                "a..b/x:1",
                "-a/x:1",
                "a-/x",
                "x\nRUN touch x",
                "x:1 y",
                "x:\u0661",
                "X",
                "a//b",
                "/x",
                "x/",
                "x:",
                "x@sha256:1",
                "h:123456/x",
                "a" * 256,
                "",
            )
        ),
        ({"name": "x\nRUN touch x"}, "is not a valid Kubernetes name"),
        ({"namespace": "a" * 64}, "63 characters at most"),
        ({"pvc": "a..b"}, "--pvc 'a..b' is not a valid Kubernetes name"),
        ({"node_selector": "a" * 254 + "/x=y"}, "write KEY=VALUE"),
        ({"output_dir": "out\nRUN touch x"}, "contains control characters"),
        ({"pvc": None}, "--pvc"),
        ({"pvc": "My_Claim"}, "--pvc 'My_Claim' is not a valid Kubernetes name"),
        ({"pvc": ""}, "--pvc '' is not a valid Kubernetes name"),
        ({"image": None}, "--image"),
        ({"image": "Registry/Sans GPU"}, "is not a valid image reference"),
        ({"image": "sansgpu:"}, "is not a valid image reference"),
        ({"image": "-rf"}, "--image"),
        ({"name": "9lives"}, "--name '9lives' is not a valid Kubernetes name"),
        ({"name": "x" * 46}, "45 characters at most"),
        ({"name": "Trial"}, "--name 'Trial' is not a valid Kubernetes name"),
        ({"namespace": "a.b"}, "--namespace 'a.b' is not a valid Kubernetes name"),
        ({"node_selector": "pool"}, "write KEY=VALUE"),
        ({"node_selector": "=cpu"}, "write KEY=VALUE"),
        ({"node_selector": "pool=a b"}, "write KEY=VALUE"),
        ({"allocator": "jemalloc"}, "--allocator"),
        ({"openmp": "tbb"}, "--openmp"),
        ({"config": Path("missing.yaml")}, "missing.yaml does not exist"),
        ({"set": "device=cuda"}, "set device to cpu"),
        ({"set": "training.distributed_backend=nccl"}, "set it to gloo"),
        ({"set": "training.treads=4"}, "did you mean training.threads"),
        ({"set": "data.dataset_name=/home/me/notes"}, "or /data/notes"),
        ({"set": "data.dataset_name=~/notes"}, "or /data/notes"),
        ({"set": "data.dataset_name=../notes"}, "data.dataset_name is ../notes"),
        ({"set": "data.validation_name=/database/x.jsonl"}, "data.validation_name is /database/x.jsonl"),
        ({"set": "data.tokenizer=/tokenizer.json"}, "data.tokenizer"),
        ({"set": "data.cache_dir=/var/cache"}, "data.cache_dir"),
        ({"set": "training.checkpoint_dir=/mnt/x"}, "training.checkpoint_dir"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    options: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, **options)


@pytest.mark.parametrize(
    ("memory", "mebibytes"),
    [("64Gi", 65536), ("1.5Gi", 1536), ("128e9", 122070), ("2E9", 1907), ("4294967296", 4096), ("+3G", 2861),
     ("2.Gi", 2048), (".5Ti", 524288), ("2147483648000m", 2048)],
)  # fmt: skip
def test_memory_is_any_quantity_of_kubernetes(memory: str, mebibytes: int) -> None:
    volumes = render(memory=memory).training_pods[0]["volumes"]
    shared = next(volume["emptyDir"]["sizeLimit"] for volume in volumes if volume["name"] == "shared-memory")
    assert shared == f"{mebibytes * (1 << 20) // 8 >> 20}Mi"


@pytest.mark.parametrize("stem", ["x\nRUN touch x", "x'$(touch x)`touch x`", "x # y", "\x1b[2J", "x\rRUN touch x"])
def test_a_configurations_name_injects_nothing(stem: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(f"{stem}.yaml")
    config.write_text(CONFIG.read_text())
    code = cli(arguments(config=config))
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    if not stem.isprintable():
        assert code == 2
        assert not Path("k8s").exists()
        return
    recipe = (Path("k8s") / stem / "Dockerfile").read_text()
    usual = render().dockerfile
    assert [line for line in recipe.splitlines() if not line.startswith("# docker build")] == [
        line for line in usual.splitlines() if not line.startswith("# docker build")
    ]
    assert f"-f {shlex.quote(f'k8s/{stem}/Dockerfile')} -t" in recipe


@pytest.mark.parametrize("name", ["notes/", "wikitext", "org/set", "/data/notes", "python-stdlib", "./a/../b.jsonl"])
def test_data_on_the_claim_or_the_hub_is_welcome(name: str) -> None:
    render("--set", f"data.dataset_name={name}")


@pytest.mark.parametrize(
    "image",
    ["sansgpu:1", "localhost:5000/a/b__c:v1.0-rc_2", "ghcr.io/me/x@sha256:" + "a" * 64, "r/x:1@sha256:" + "b" * 64],
)
def test_images_that_have_a_version(image: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert render(image=image).container["image"] == image
    assert capsys.readouterr().err == ""


def test_an_image_without_a_version_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    render(image="localhost:5000/sansgpu")
    assert f"localhost:5000/sansgpu:{__version__}" in capsys.readouterr().err


def test_a_label_given_twice_is_refused_where_its_values_differ(capsys: pytest.CaptureFixture[str]) -> None:
    both = ("--node-selector", "pool=a", "--node-selector", "pool=b")
    assert "sets pool to both a and b" in refused(capsys, *both)


def test_a_folder_is_written_again_but_not_over_others_files(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = render(), render(nodes=2)
    assert first.texts.keys() == second.texts.keys()
    assert second.worker["replicas"] == 2
    Path("out/notes.txt").write_text("mine")
    assert render(nodes=3).worker["replicas"] == 3
    assert Path("out/notes.txt").read_text() == "mine"
    Path("out/pytorchjob.yaml").write_text("edited: by hand")
    assert "out/pytorchjob.yaml was not written by sansgpu or has changed" in refused(capsys, output_dir="out")
    Path("others").mkdir()
    Path("others/notes.txt").write_text("mine")
    assert "others contains files that sansgpu did not write, such as notes.txt" in refused(capsys, output_dir="others")
    Path("file").write_text("where a folder should be")
    assert "file/k8s cannot be written" in refused(capsys, output_dir="file/k8s")
    assert "file is a file, not a folder" in refused(capsys, output_dir="file")


def test_the_commands_that_follow_bring_the_data_and_fetch_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    Path("texts/deep").mkdir(parents=True)
    capsys.readouterr()
    data = ("--set", "data.dataset_name=texts/deep/", "--namespace", "research")
    assert cli(arguments(*data, "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert all(Path(file).is_file() for file in result["files"])
    assert result["access_mode"] == "ReadWriteMany"
    assert (result["threads"], result["run"]) == (15, "/data/runs/cpu-80m")
    commands = result["commands"]
    assert "kubectl --namespace research cp texts/deep cpu-80m-files:/data/texts/deep" in commands
    assert "kubectl --namespace research exec cpu-80m-files -- mkdir -p /data/texts" in commands
    assert any(command.endswith("apply -f k8s/cpu_80m/pytorchjob.yaml") for command in commands)
    assert any("logs -f" in command and "instance=cpu-80m" in command for command in commands)
    assert any(command.endswith("cp cpu-80m-files:/data/runs/cpu-80m/final cpu-80m-final") for command in commands)
    assert cli(arguments()) == 0
    shown = capsys.readouterr().out
    assert "must be ReadWriteMany" in shown
    assert "docker build -f k8s/cpu_80m/Dockerfile -t registry.example/sansgpu:1 ." in shown
    assert cli(arguments(nodes=1)) == 0
    assert "ReadWriteMany" not in capsys.readouterr().out


def test_the_image_is_made_of_what_a_checkout_has() -> None:
    rendered = render()
    lines = rendered.dockerfile.splitlines()
    copied = [source for line in lines if line.startswith("COPY") for source in line.split()[1:-1]]
    assert {"pyproject.toml", "constraints.txt", "src"} <= {*copied}
    assert all((ROOT / source).exists() for source in copied)
    ignored = rendered.texts["Dockerfile.dockerignore"].splitlines()
    assert ignored[1] == "*"
    assert {f"!{source}" for source in copied} <= {*ignored}
    package_data = (ROOT / "pyproject.toml").read_text()
    assert "jobs/k8s/templates/*" in package_data  # else an installed sansgpu could render nothing


def test_the_image_pins_what_is_in_it_and_runs_as_nobody() -> None:
    rendered = render()
    text = rendered.dockerfile
    assert re.search(r"^FROM python:3\.12\.\d+-slim-bookworm$", text, re.MULTILINE)
    assert f"torch=={torch.__version__.partition('+')[0]}" in text
    assert "https://download.pytorch.org/whl/cpu" in text
    assert {"g++", "libgomp1", "libtcmalloc-minimal4"} <= {*text.split()}
    installs = [line for line in text.splitlines() if "pip install" in line]
    assert all("--no-cache-dir" in line for line in installs)
    assert all("-c constraints.txt" in line or "==" in line for line in installs)
    assert f'test "$(sansgpu --version)" = {__version__}' in text
    assert text.splitlines()[-2:] == [f"USER {USER}:{USER}", "WORKDIR /data"]
    assert "'.[wandb]'" in render("--set", "training.report_to=[wandb]").dockerfile
    assert {*requirements("sansgpu")} - {*pinned()} == {"sansgpu", "torch"}


def pinned() -> Iterator[str]:
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if "==" in line:
            yield line.partition("==")[0].lower().replace("_", "-")


def requirements(name: str, seen: set[str] | None = None) -> set[str]:
    """A distribution and all it needs on this machine, by their names; without extras."""
    seen = set() if seen is None else seen
    name = name.lower().replace("_", "-")
    if name not in seen:
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            return seen  # for another platform or Python
        seen.add(name)
        for line in needed:
            inner = re.match(r"[A-Za-z0-9._-]+", line)
            if inner and "extra ==" not in line:
                requirements(inner[0], seen)
    return seen


def test_what_pods_start_trains_and_goes_on_where_it_was(tmp_path: Path) -> None:
    claim = tmp_path / "claim"
    claim.mkdir()
    write_corpus(claim / "corpus.jsonl")
    chosen = settings(data__dataset_name="corpus.jsonl", training__max_steps=4)
    rendered = render(*chosen, config=ROOT / "configs/tiny.yaml", cpus=1)
    Path("config.yaml").write_text(rendered.objects["ConfigMap"]["data"]["config.yaml"])
    places = {"/etc/sansgpu/config.yaml": str(tmp_path / "config.yaml"), "/data/runs/tiny": str(claim / "runs/tiny")}
    command = [places.get(part, part) for part in rendered.container["command"]]
    operator = {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "localhost:0",
        "PET_NNODES": "1:1",
        "PET_NPROC_PER_NODE": rendered.elastic["nprocPerNode"],
        "PET_MAX_RESTARTS": "0",
    }
    ours = {name: value for name, value in rendered.env.items() if not value.startswith(("/data", "/usr", "/tmp"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**environment(tmp_path / "cache"), **operator, **ours, "PATH": path}
    for attempt in range(2):
        done = subprocess.run(command, cwd=claim, env=variables, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-2000:]
        events = [json.loads(line) for line in done.stdout.splitlines()]
        assert events[-1]["event"] == "end"
        assert events[-1]["reason"] == "done"
        start = next(event for event in events if event["event"] == "start")
        assert start["step"] == (4 if attempt else 0)
    assert (claim / "runs/tiny/final/config.json").is_file()
