"""Valid and invalid arguments of `k8s`."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from sansgpu import __version__
from sansgpu.cli import run as cli
from tests.jobs.k8s.rendered import CONFIG, Rendered, arguments, refused, render

pytestmark = pytest.mark.usefixtures("empty_folder")

BAD_QUANTITIES = [
    "inf", "nan", "1e999Gi", "9" * 400, "9223372036854775808", "8Ei", "1e99", "64Gib", "64 Gi", "64Gi\n", "٦٤Gi",
    "0x10Gi", "1_000Mi", ".Gi", "",
]  # fmt: skip
BAD_IMAGES = [
    "../x", "./x", "a..b/x:1", "-a/x:1", "a-/x", "x\nRUN touch x", "x:1 y", "x:\u0661", "X", "a//b", "/x", "x/", "x:",
    "x@sha256:1", "h:123456/x", "a" * 256, "",
]  # fmt: skip


@pytest.mark.parametrize(
    ("stem", "name"), [("cpu_80m", "cpu-80m"), ("Ünï çode.v2", "n-ode-v2"), ("7b", "run-7b"), ("x" * 90, "x" * 45)]
)
def test_the_name_of_a_run_derives_from_its_configuration(stem: str, name: str) -> None:
    config = Path(f"{stem}.yaml")
    config.write_text(CONFIG.read_text())
    assert cli(arguments(config=config)) == 0
    rendered = Rendered(Path("k8s") / stem)
    assert {m["metadata"]["name"] for k, m in rendered.objects.items() if k != "Pod"} == {name}


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
        *(({"memory": text}, "is not a Kubernetes quantity") for text in BAD_QUANTITIES),
        *(({"image": name}, "is not a valid image reference") for name in BAD_IMAGES),
        ({"name": "x\nRUN touch x"}, "is not a valid Kubernetes name"),
        ({"namespace": "a" * 64}, "at most 63 characters"),
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
        ({"name": "x" * 46}, "at most 45 characters"),
        ({"name": "Trial"}, "--name 'Trial' is not a valid Kubernetes name"),
        ({"namespace": "a.b"}, "--namespace 'a.b' is not a valid Kubernetes name"),
        ({"node_selector": "pool"}, "write KEY=VALUE"),
        ({"node_selector": "=cpu"}, "write KEY=VALUE"),
        ({"node_selector": "pool=a b"}, "write KEY=VALUE"),
        ({"allocator": "jemalloc"}, "--allocator"),
        ({"openmp": "tbb"}, "--openmp"),
        ({"config": Path("missing.yaml")}, "missing.yaml does not exist"),
        ({"set": "device=cuda"}, "set device to cpu"),
        ({"set": "training.distributed_backend=mpi"}, "set it to gloo"),
        ({"create_pvc": "much"}, "--create-pvc 'much' is not a Kubernetes quantity"),
        ({"nodes": 5}, "--nodes is 5, but a step has 4 examples, and each node needs at least one; raise training."),
        ({"nodes": 4, "processes_per_node": 2}, "--nodes is 4 with 2 processes each, but a step has 4 examples, and"),
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
def test_invalid_arguments_are_refused_in_one_sentence(
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
def test_data_may_be_on_the_claim_or_the_hub(name: str) -> None:
    render("--set", f"data.dataset_name={name}")


@pytest.mark.parametrize(
    "image",
    ["sansgpu:1", "localhost:5000/a/b__c:v1.0-rc_2", "ghcr.io/me/x@sha256:" + "a" * 64, "r/x:1@sha256:" + "b" * 64],
)
def test_images_with_a_version_are_accepted(image: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert render(image=image).container["image"] == image
    assert "warning" not in capsys.readouterr().err


def test_an_image_without_a_version_causes_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    render(image="localhost:5000/sansgpu")
    assert f"localhost:5000/sansgpu:{__version__}" in capsys.readouterr().err


def test_a_label_with_two_values_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    both = ("--node-selector", "pool=a", "--node-selector", "pool=b")
    assert "sets pool to both a and b" in refused(capsys, *both)
