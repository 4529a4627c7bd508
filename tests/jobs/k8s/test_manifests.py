"""`k8s` writes manifests that the published schemas of Kubeflow and Kubernetes accept."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sansgpu.cli import run as cli
from sansgpu.jobs.k8s import USER
from sansgpu.tasks.configuration import load_config
from tests.jobs.k8s.rendered import CONFIG, OPTIONS, OWN_RUNTIME, ROOT, arguments, refused, render
from tests.processes import as_options, environment, settings, write_corpus

pytestmark = pytest.mark.usefixtures("empty_folder")
MODELS = {
    "ConfigMap": "IoK8sApiCoreV1ConfigMap",
    "Pod": "IoK8sApiCoreV1Pod",
    "PersistentVolumeClaim": "IoK8sApiCoreV1PersistentVolumeClaim",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}


def as_in_schema(manifest: dict[str, Any]) -> Any:
    """Returns the object after a round trip through its published schema, which drops unknown fields."""
    if manifest["kind"] == "PyTorchJob":
        from kubeflow.training import ApiClient

        client = ApiClient()
        read = client.deserialize(SimpleNamespace(data=json.dumps(manifest)), "KubeflowOrgV1PyTorchJob")
        return client.sanitize_for_serialization(read)
    import kubeflow_trainer_api.models as trainer  # takes seconds

    read = getattr(trainer, MODELS[manifest["kind"]]).from_dict(manifest)
    assert read is not None
    return json.loads(json.dumps(read.to_dict()))


@pytest.mark.parametrize(
    "options",
    [
        (),
        (
            "--namespace",
            "research",
            "--name",
            "trial-7",
            "--min-nodes",
            "2",
            "--nodes",
            "2",
            "--processes-per-node",
            "2",
        ),
        ("--node-selector", "kubernetes.io/arch=amd64", "--node-selector", "pool=cpu", "--openmp", "libiomp"),
        ("--allocator", "none", "--set", "training.report_to=none"),
        (OWN_RUNTIME, "--namespace", "research", "--node-selector", "pool=cpu"),
    ],
)
def test_every_object_is_what_its_schema_allows(options: tuple[str, ...]) -> None:
    rendered = render(*options)
    assert {k: [o["kind"] for o in v] for k, v in rendered.by_file.items()} == {
        "pytorchjob.yaml": ["ConfigMap", "PyTorchJob"],
        "trainjob.yaml": ["ConfigMap", *(["TrainingRuntime"] if OWN_RUNTIME in options else []), "TrainJob"],
        "files.yaml": ["Pod"],
    }
    for manifest in rendered.objects.values():
        assert as_in_schema(manifest) == manifest


@pytest.mark.parametrize(("nodes", "mode"), [(1, "ReadWriteOnce"), (2, "ReadWriteMany")])
def test_the_claim_is_created_on_request(nodes: int, mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    rendered = render("--namespace", "research", nodes=nodes, create_pvc="200Gi")
    [claim] = rendered.by_file["claim.yaml"]
    assert as_in_schema(claim) == claim
    assert (claim["metadata"]["name"], claim["metadata"]["namespace"]) == ("corpus", "research")
    assert claim["spec"] == {"accessModes": [mode], "resources": {"requests": {"storage": "200Gi"}}}
    assert "app.kubernetes.io/instance" not in claim["metadata"]["labels"]  # other runs may use it, too
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines.index("kubectl --namespace research apply -f out/claim.yaml") < next(
        index for index, line in enumerate(lines) if line.endswith("apply -f out/trainjob.yaml")
    )
    assert f"claim.yaml creates the claim corpus of 200Gi in the default storage class ({mode})." in shown


def test_a_claim_without_room_for_the_snapshots_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    render(create_pvc="2Gi")
    assert "5 snapshots need 5.5 GB, but --create-pvc is 2Gi; raise it." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("PyTorchJob", ("spec", "elasticPolicy", "minReplica")),
        ("PyTorchJob", ("spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "terminationGracePeriod")),
        ("PyTorchJob", ("spec", "pytorchReplicaSpecs", "Worker", "template", "spec", "containers", 0, "workDir")),
        ("TrainJob", ("spec", "trainer", "numProcsPerNode")),
        ("TrainJob", ("spec", "podTemplateOverrides")),  # replaced by runtimePatches in Trainer 2.2
        ("TrainingRuntime", ("spec", "mlPolicy", "torch", "numProcPerNode")),  # removed in Trainer 2.3
        ("TrainingRuntime", ("spec", "template", "spec", "failurePolicy", "maxRestart")),
        ("Pod", ("spec", "securityContext", "fsgroup")),
        ("ConfigMap", ("datas",)),
    ],
)
def test_a_misspelt_field_would_be_noticed(kind: str, path: tuple[Any, ...]) -> None:
    manifest = render(OWN_RUNTIME).objects[kind]
    inner = manifest
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = 1
    assert as_in_schema(manifest) != manifest


TRAIN = "torchrun -m sansgpu train /etc/sansgpu/config.yaml --output-dir /data/runs/{} --resume latest --headless"


def test_a_pytorchjob_is_elastic() -> None:
    rendered = render(min_nodes=2)
    job = rendered.elastic
    assert rendered.objects["PyTorchJob"]["apiVersion"] == "kubeflow.org/v1"
    assert job["elasticPolicy"].items() >= {"rdzvBackend": "c10d", "minReplicas": 2, "maxReplicas": 4}.items()
    assert job["elasticPolicy"]["maxRestarts"] > 0
    assert "nProcPerNode" not in job["elasticPolicy"]  # deprecated, and refused together with spec.nprocPerNode
    assert job["pytorchReplicaSpecs"].keys() == {"Worker"}
    assert (rendered.worker["replicas"], rendered.worker["restartPolicy"]) == (4, "OnFailure")
    assert rendered.container["name"] == "pytorch"
    assert rendered.container["command"] == TRAIN.format("cpu-80m").split()
    assert job["runPolicy"]["cleanPodPolicy"] == "None"  # keeps the pods and their logs
    assert "ttlSecondsAfterFinished" not in job["runPolicy"]
    assert job["runPolicy"]["backoffLimit"] >= 4


def test_a_trainjob_may_have_its_own_runtime() -> None:
    rendered = render(OWN_RUNTIME, "--name", "trial")
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


def test_a_trainjob_uses_the_runtime_of_the_cluster_and_its_pods_are_as_in_its_own_runtime() -> None:
    patched, own = render(), render(OWN_RUNTIME)
    job = patched.objects["TrainJob"]["spec"]
    assert "TrainingRuntime" not in patched.objects
    assert job["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": "torch-distributed"
    }  # fmt: skip
    [token, _] = patched.trainer["env"][-2:]
    secret = {"name": "cpu-80m", "key": "HF_TOKEN", "optional": True}
    assert token == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}}
    assert patched.trainer == {**own.trainer, "env": [*own.trainer["env"], *patched.trainer["env"][-2:]]}
    pod, other = patched.training_pods[1], own.training_pods[1]
    [container], [like] = pod["containers"], other["containers"]
    for key in ("volumes", "securityContext", "terminationGracePeriodSeconds"):
        assert pod[key] == other[key]
    assert container == {key: like[key] for key in ("name", "securityContext", "volumeMounts")}
    assert like["workingDir"] in re.findall("^WORKDIR (.*)$", patched.dockerfile, re.MULTILINE)[-1:]
    labels = patched.node["template"]["spec"]["template"]["metadata"]["labels"]
    assert labels == own.node["template"]["spec"]["template"]["metadata"]["labels"]
    [spread] = pod["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert spread["podAffinityTerm"]["labelSelector"]["matchLabels"].items() <= labels.items()


def test_a_lost_pod_restarts_a_trainjob_and_is_not_a_failure() -> None:
    rendered = render(OWN_RUNTIME)
    policy = rendered.runtime["template"]["spec"]["failurePolicy"]
    assert policy["maxRestarts"] > 0
    [rule] = policy["rules"]
    assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])  # JobSet requires this
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])
    job = rendered.node["template"]["spec"]
    assert job["backoffLimit"] == 0
    assert job["podFailurePolicy"]["rules"][0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # required by podFailurePolicy


def test_all_persistent_data_is_on_the_volume_claim() -> None:
    rendered = render(OWN_RUNTIME)
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


def test_pods_have_the_label_of_the_run_and_no_sidecar_proxy() -> None:
    rendered = render(OWN_RUNTIME)
    files = rendered.objects["Pod"]["metadata"]["labels"]
    for template in (rendered.worker["template"], rendered.node["template"]["spec"]["template"]):
        labels = template["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "cpu-80m"
        assert labels["sidecar.istio.io/inject"] == "false"
        [spread] = template["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
        assert not spread["labelSelector"]["matchLabels"].items() <= files.items()
    assert "app.kubernetes.io/instance" not in files  # otherwise `kubectl logs` would show this pod


def test_pods_have_no_privileges() -> None:
    rendered = render(OWN_RUNTIME)
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


def test_the_config_map_holds_the_given_configuration() -> None:
    changes = ("training.max_steps=7", "data.dataset_name=notes/", "training.report_to=[tensorboard]")
    rendered = render(*as_options(changes))
    Path("config.yaml").write_text(rendered.objects["ConfigMap"]["data"]["config.yaml"])
    assert load_config(Path("config.yaml"))[0] == load_config(CONFIG, changes)[0]
    assert rendered.by_file["pytorchjob.yaml"][0] == rendered.by_file["trainjob.yaml"][0]


def test_names_and_nodes_are_as_requested() -> None:
    rendered = render("--node-selector", "pool=cpu", namespace="research", name="trial")
    for manifest in rendered.objects.values():
        assert manifest["metadata"]["namespace"] == "research"
        assert manifest["metadata"]["name"] == ("trial-files" if manifest["kind"] == "Pod" else "trial")
    for pod in rendered.pods:
        assert pod["nodeSelector"] == {"pool": "cpu"}
    assert "namespace" not in render().objects["TrainJob"]["metadata"]
    assert all("nodeSelector" not in pod for pod in render().pods)


def test_own_files_are_overwritten_and_foreign_ones_are_not(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_the_suggested_commands_copy_the_data_and_fetch_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    Path("texts/deep").mkdir(parents=True)
    capsys.readouterr()
    data = ("--set", "data.dataset_name=texts/deep/", "--namespace", "research")
    assert cli(arguments(*data, "--json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert all(Path(file).is_file() for file in result["files"])
    assert result["access_mode"] == "ReadWriteMany"
    assert (result["threads"], result["run"]) == (16, "/data/runs/cpu-80m")
    commands = result["commands"]
    assert "kubectl --namespace research cp texts/deep cpu-80m-files:/data/texts/deep" in commands
    assert "kubectl --namespace research exec cpu-80m-files -- mkdir -p /data/texts" in commands
    assert any(command.endswith("apply -f k8s/cpu_80m/trainjob.yaml") for command in commands)
    assert any("logs -f" in command and "instance=cpu-80m" in command for command in commands)
    assert any(command.endswith("cp cpu-80m-files:/data/runs/cpu-80m/final cpu-80m-final") for command in commands)
    assert cli(arguments()) == 0
    shown = capsys.readouterr().out
    assert "must be ReadWriteMany" in shown
    assert "docker build -f k8s/cpu_80m/Dockerfile -t registry.example/sansgpu:1 ." in shown
    assert cli(arguments(nodes=1)) == 0
    assert "ReadWriteMany" not in capsys.readouterr().out


@pytest.mark.long
def test_the_command_of_a_pod_trains_and_resumes(tmp_path: Path) -> None:
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
