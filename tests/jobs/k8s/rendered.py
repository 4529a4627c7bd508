"""Runs `sansgpu k8s` and parses the files that it writes."""

from pathlib import Path

import pytest
import yaml

from sansgpu.cli import run as cli
from tests.processes import messages

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs/cpu_80m.yaml"
OPTIONS = {"nodes": 4, "cpus": 16, "memory": "64Gi", "pvc": "corpus", "image": "registry.example/sansgpu:1"}


def arguments(*more: str, config: Path = CONFIG, **options: object) -> list[str]:
    merged = {**OPTIONS, **options}
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in merged.items() if value is not None]
    return ["k8s", str(config), *(part for pair in pairs for part in pair), *more]


class Rendered:
    """The parsed files that one `sansgpu k8s` command wrote."""

    def __init__(self, folder: Path) -> None:
        self.texts = {path.name: path.read_text() for path in folder.iterdir()}
        files = {name: list(yaml.safe_load_all(text)) for name, text in self.texts.items() if name.endswith(".yaml")}
        self.by_file = files
        self.objects = {o["kind"]: o for objects in files.values() for o in objects}
        self.dockerfile = self.texts["Dockerfile"]
        self.elastic = self.objects["PyTorchJob"]["spec"]
        self.worker = self.elastic["pytorchReplicaSpecs"]["Worker"]
        job = self.objects["TrainJob"]["spec"]
        self.trainer = job["trainer"]
        [self.runtime] = (
            [self.objects["TrainingRuntime"]["spec"]]
            if "TrainingRuntime" in self.objects
            else [patch["trainingRuntimeSpec"] for patch in job["runtimePatches"]]
        )
        [self.node] = self.runtime["template"]["spec"]["replicatedJobs"]
        self.training_pods = [self.worker["template"]["spec"], self.node["template"]["spec"]["template"]["spec"]]
        self.pods = [*self.training_pods, self.objects["Pod"]["spec"]]
        [self.container] = self.training_pods[0]["containers"]
        self.env = {pair["name"]: pair["value"] for pair in self.container["env"]}


OWN_RUNTIME = "--own-runtime"


def render(*more: str, **options: object) -> Rendered:
    assert cli(arguments(*more, output_dir="out", **options)) == 0
    return Rendered(Path("out"))


def refused(capsys: pytest.CaptureFixture[str], *more: str, **options: object) -> str:
    """Runs a command that must fail without writing anything, and returns its error."""
    capsys.readouterr()
    before = sorted(Path().rglob("*"))
    assert cli(arguments(*more, **options)) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    [line] = messages(captured.err)
    assert line.startswith("sansgpu: ")
    assert sorted(Path().rglob("*")) == before
    return line
