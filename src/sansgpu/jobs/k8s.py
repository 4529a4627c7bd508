"""Writes the Dockerfile and the Kubernetes manifests of a run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

import torch
import yaml

from sansgpu.config import BUILT_IN_NAMES, ConfigError, acting_values, setting
from sansgpu.config.schema import Config
from sansgpu.config.section import declared_keys
from sansgpu.events.progress import ReportProgress
from sansgpu.files.atomic import write_failures_as
from sansgpu.files.ownership import OutputFolder
from sansgpu.jobs.cluster_files import ESTIMATING, PodNeeds, needs_of, template, threads_of_process
from sansgpu.machine.distributed.world import SHUTDOWN_TIMEOUT
from sansgpu.planning.cluster import require_examples
from sansgpu.tasks.configuration import load_config
from sansgpu.train.run_folders import require_plain_name
from sansgpu.version import __version__

PYTHON_IMAGE = "python:3.12.12-slim-bookworm"
INTEL_OPENMP = "intel-openmp==2026.2.0"
CLAIM = "claim.yaml"
FILES = ("Dockerfile", "Dockerfile.dockerignore", "trainjob.yaml", "pytorchjob.yaml", "files.yaml", CLAIM)
DATA, CONFIG = "/data", "/etc/sansgpu"  # mount points of the claim and the configuration
COMMAND = "torchrun -m sansgpu train {config}/config.yaml --output-dir {run} --resume latest --headless"
USER = 1000  # user of the image, and group that owns the claim's files
# Paths in the image, the same on every architecture.
TCMALLOC, LIBIOMP = "/usr/local/lib/libtcmalloc.so", "/usr/local/lib/libiomp5.so"
# Restart limit of each pod, or of all pods of a TrainJob together. A lost node counts only if the operator cannot
# detect it.
POD_RESTARTS = 10
TOKENS = ("HF_TOKEN", "WANDB_API_KEY")  # keys of the run's secret; a TrainJob cannot import all keys of a secret
REAP_SECONDS = 10  # torchrun kills processes that have not saved yet this long before Kubernetes kills the pod
SHARED_MEMORY_DIVISOR = 8  # /dev/shm may use an eighth of a pod's memory
MIN_BYTES = 1 << 30  # a pod has at least this much memory, and a claim this much storage
MAX_DOMAIN_LENGTH = 253
MAX_NAME_LENGTH = 45  # Kubernetes' 63 without the suffix that operators append, e.g. `-node-0-1234-abcde`

# Kubernetes' quantities: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity
_QUANTITY = (
    r"\+?(?P<number>[0-9]+\.?[0-9]*|\.[0-9]+)((?P<exponent>[eE][-+]?[0-9]{1,2})|(?P<suffix>[KMGTPE]i|[mkMGTPE]))?"
)
_UNITS = {"": Decimal(1), "m": Decimal("0.001")}
_UNITS |= {unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", 1)}
_UNITS |= {f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)}
_LARGEST = (1 << 63) - 1
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"  # RFC 1123
_DOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
# The grammar of image references: https://pkg.go.dev/github.com/distribution/reference
_IMAGE_PART = r"[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*"
_HOST_PART = r"[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?"
_HOST = rf"{_HOST_PART}(\.{_HOST_PART})*(:[0-9]{{1,5}})?"
_TAG = r":[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_VERSION = rf"{_TAG}|({_TAG})?@sha256:[0-9a-f]{{64}}"
_IMAGE = rf"(?P<name>({_HOST}/)?{_IMAGE_PART}(/{_IMAGE_PART})*)(?P<version>{_VERSION})?"
_MAX_IMAGE_LENGTH = 255  # characters of the name without its version
_OUTPUT_KEYS = ("data.cache_dir", "training.checkpoint_dir", "training.logging_dir")


@dataclass(frozen=True)
class ClusterRequest:
    """Arguments of the k8s command."""

    config_file: Path | None
    overrides: Sequence[str]
    nodes: int
    cpus: int
    memory: str
    pvc: str
    image: str
    min_nodes: int = 1
    processes_per_node: int = 1
    node_selector: Sequence[str] = ()
    namespace: str | None = None
    name: str | None = None
    allocator: str = "tcmalloc"
    openmp: str = "libgomp"
    create_pvc: str | None = None  # size of the claim to create
    own_runtime: bool = False  # write a TrainingRuntime instead of using the cluster's
    output_dir: Path | None = None

    @property
    def config_name(self) -> str:
        return self.config_file.stem if self.config_file else "default"


@dataclass(frozen=True)
class ClusterJob:
    """Values of the manifests that follow from a valid request."""

    request: ClusterRequest
    name: str
    config: str  # YAML
    threads: int  # per process
    shared_memory: str
    node_selector: dict[str, str]
    grace_seconds: int

    @property
    def access_mode(self) -> str:
        """The access mode that the claim needs."""
        return "ReadWriteMany" if self.request.nodes > 1 else "ReadWriteOnce"

    @property
    def run(self) -> str:
        """The run folder, shared by all pods."""
        return f"{DATA}/runs/{self.name}"


def kubernetes(request: ClusterRequest, progress: ReportProgress, warn: Callable[[str], None]) -> dict[str, Any]:
    """Writes the files and returns their summary and the next commands. Raises ConfigError."""
    processes = request.nodes * request.processes_per_node
    # Its paths are on the claim.
    config, notes = load_config(request.config_file, request.overrides, find_beside=False, processes=processes)
    for note in notes:
        warn(note)
    progress(ESTIMATING, 0, 0)
    job = resolve_request(request, config, warn)
    folder = request.output_dir or Path("k8s") / request.config_name
    require_plain_name(folder)
    texts = _texts(job, config, folder)
    with write_failures_as(ConfigError, folder, "--output-dir"), OutputFolder(folder, "cluster").replace() as new:
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")
    return _summary(job, config, folder, [str(folder / name) for name in texts])


def _texts(job: ClusterJob, config: Config, folder: Path) -> dict[str, str]:
    """Returns the contents of the files by name."""
    request = job.request
    values = {
        "job": job,
        "request": request,
        "path": shlex.quote((folder / "Dockerfile").as_posix()),
        "base": PYTHON_IMAGE,
        "version": __version__,
        "torch": torch.__version__.partition("+")[0],  # the installed version, which is tested
        "intel_openmp": INTEL_OPENMP,
        "packages": ["g++", "libgomp1", *(["libtcmalloc-minimal4"] if request.allocator == "tcmalloc" else [])],
        "extras": ["hf", "report", *config.training.report_to],
        "tcmalloc": TCMALLOC,
        "libiomp": LIBIOMP,
        "preloaded": [TCMALLOC] * (request.allocator == "tcmalloc") + [LIBIOMP] * (request.openmp == "libiomp"),
        "user": USER,
        "data": DATA,
        "config_folder": CONFIG,
        "command_line": shlex.split(COMMAND.format(config=CONFIG, run=job.run)),
        "shutdown_timeout": SHUTDOWN_TIMEOUT,
        "reap_seconds": REAP_SECONDS,
        "pod_restarts": POD_RESTARTS,
        "tokens": TOKENS,
    }
    names = [name for name in FILES if name != CLAIM or request.create_pvc]
    return {name: template(name).render(values) for name in names}


def resolve_request(request: ClusterRequest, config: Config, warn: Callable[[str], None]) -> ClusterJob:
    """Returns the values of the manifests. Raises ConfigError if Kubernetes would reject them or pods could not run."""
    if request.min_nodes > request.nodes:
        raise ConfigError(f"--min-nodes {request.min_nodes} is greater than --nodes {request.nodes}; lower it.")
    name = request.name or _as_name(request.config_name)
    _require(
        "[a-z]([-a-z0-9]*[a-z0-9])?", MAX_NAME_LENGTH, "--name", name, "a letter, then lowercase letters, digits and -"
    )
    _require(_DOMAIN, MAX_DOMAIN_LENGTH, "--pvc", request.pvc, "lowercase letters, digits, - and .")
    if request.namespace is not None:
        _require(_LABEL, 63, "--namespace", request.namespace, "lowercase letters, digits and -")
    _check_image(request.image, warn)
    selector = _node_selector(request.node_selector)
    memory, threads = _bytes_of("--memory", request.memory), _threads(config, request)
    storage = None if request.create_pvc is None else _bytes_of("--create-pvc", request.create_pvc)
    _require_pods_can_run(config)
    require_examples(request.nodes, config, request.processes_per_node)
    needs = needs_of(config, threads, request.min_nodes * request.processes_per_node, warn)
    _warn_if_short(needs, memory // request.processes_per_node, warn)
    kept = config.training.keep_last + 2
    if storage is not None and storage < (snapshots := int(kept * needs.snapshot)):
        warn(f"{kept} snapshots need {snapshots / 1e9:.1f} GB, but --create-pvc is {request.create_pvc}; raise it.")
    return ClusterJob(
        request=request,
        name=name,
        config=yaml.safe_dump(acting_values(config), sort_keys=False, allow_unicode=True),
        threads=threads,
        shared_memory=f"{memory // SHARED_MEMORY_DIVISOR >> 20}Mi",
        node_selector=selector,
        grace_seconds=needs.grace_seconds,
    )


def on_claim(path: str) -> str:
    """Returns a path as pods see it. Relative paths are relative to the claim."""
    return normpath(path if path.startswith("/") else f"{DATA}/{path}")


def local_file(config: Config) -> list[str]:
    """Returns the relative input paths of the configuration that exist on this machine."""
    paths = (path for _, path in _paths(config, _input_keys(config)) if not path.startswith("/"))
    return [normpath(path) for path in dict.fromkeys(paths) if Path(path).exists()]


def _input_keys(config: Config) -> list[str]:
    return [*declared_keys(type(config), "input_path")]


def _paths(config: Config, keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields (key, value) of the keys that are set. A value may also be a Hub name instead of a path."""
    for key in keys:
        value = setting(config, key)
        if value and value not in BUILT_IN_NAMES:
            yield key, value


def _require_pods_can_run(config: Config) -> None:
    training = config.training
    if training.device == "cuda" and not training.force_cpu:
        raise ConfigError("device is cuda, which the image's build of torch does not support; set device to cpu.")
    if (backend := training.distributed_backend) not in ("gloo", "nccl"):  # pods use gloo instead of nccl
        raise ConfigError(
            f"training.distributed_backend is {backend}, which the image's build of torch does not support; set it to "
            "gloo."
        )
    for key, path in _paths(config, [*_input_keys(config), *_OUTPUT_KEYS]):
        if path.startswith("~") or not f"{on_claim(path)}/".startswith(f"{DATA}/"):
            raise ConfigError(
                f"{key} is {path}, but pods can only access the claim, mounted at {DATA}; set it to a path on the "
                "claim, e.g. "
                f"{PurePosixPath(path).name or 'notes'} or {DATA}/{PurePosixPath(path).name or 'notes'}."
            )


def _as_name(stem: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"
    return name[:MAX_NAME_LENGTH].rstrip("-")


def _require(pattern: str, max_length: int, option: str, value: str, allowed: str) -> None:
    if not re.fullmatch(pattern, value) or len(value) > max_length:
        raise ConfigError(
            f"{option} {value!r} is not a valid Kubernetes name; use {allowed}, and at most {max_length} characters."
        )


def _check_image(image: str, warn: Callable[[str], None]) -> None:
    match = re.fullmatch(_IMAGE, image)
    if match is None or len(match["name"]) > _MAX_IMAGE_LENGTH:
        raise ConfigError(
            f"--image {image!r} is not a valid image reference; write it as registry.example/sansgpu:{__version__}."
        )
    if match["version"] is None:
        warn(f"{image} has no tag, so pods may run different versions; use --image {image}:{__version__}.")


def _node_selector(pairs: Sequence[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if (
            not re.fullmatch(rf"({_DOMAIN}/)?{_WORD}=({_WORD})?", pair)
            or len(key.rpartition("/")[0]) > MAX_DOMAIN_LENGTH
        ):
            raise ConfigError(f"--node-selector {pair!r} is not a valid node label; write KEY=VALUE.")
        if labels.setdefault(key, value) != value:
            raise ConfigError(f"--node-selector sets {key} to both {labels[key]} and {value}; remove one of them.")
    return labels


def _bytes_of(option: str, size: str) -> int:
    """Parses a Kubernetes quantity such as 64Gi to bytes. Raises ConfigError if it is invalid or out of range."""
    match = re.fullmatch(_QUANTITY, size)
    amount = 0
    if match is not None:
        amount = int(Decimal(match["number"] + (match["exponent"] or "")) * _UNITS[match["suffix"] or ""])
    if match is None or amount > _LARGEST:
        raise ConfigError(f"{option} {size[:40]!r} is not a Kubernetes quantity; write e.g. 64Gi.")
    if amount < MIN_BYTES:
        raise ConfigError(f"{option} {size} is {amount:,} bytes, too little for a run; write e.g. 64Gi.")
    return amount


def _threads(config: Config, request: ClusterRequest) -> int:
    cpus, processes, threads = request.cpus, request.processes_per_node, config.training.threads
    share = threads_of_process(cpus, processes)
    if threads == "auto":
        return share
    if threads * processes > cpus:
        total = f"{threads} threads in each of {processes} processes" if processes > 1 else f"{threads} threads"
        raise ConfigError(f"training.threads is {total}, but --cpus is {cpus}; set it to auto or raise --cpus.")
    return threads


def _warn_if_short(needs: PodNeeds, available: int, warn: Callable[[str], None]) -> None:
    if not needs.fit(available):
        warn(
            f"each process needs about {needs.memory / 1e9:.1f} GB of memory, but its share of a pod is "
            f"{available / 1e9:.1f} GB; raise --memory, or shrink the run as `sansgpu plan` suggests."
        )


def _summary(job: ClusterJob, config: Config, folder: Path, files: list[str]) -> dict[str, Any]:
    request = job.request
    return {
        "name": job.name,
        "namespace": request.namespace,
        "files": files,
        "nodes": request.nodes,
        "min_nodes": request.min_nodes,
        "processes_per_node": request.processes_per_node,
        "threads": job.threads,
        "cpus": request.cpus,
        "memory": request.memory,
        "grace_seconds": job.grace_seconds,
        "claim": request.pvc,
        "storage": request.create_pvc,
        "access_mode": job.access_mode,
        "run": job.run,
        "commands": [shlex.join(command) for command in _commands(job, config, folder)],
    }


def _commands(job: ClusterJob, config: Config, folder: Path) -> list[list[str]]:
    """Returns the next commands, e.g. build the image, copy local data, start the run, copy the model."""
    request = job.request
    kubectl = ["kubectl", *(["--namespace", request.namespace] if request.namespace else [])]
    pod, files = f"{job.name}-files", str(folder / "files.yaml")
    start_pod = [
        [*kubectl, "apply", "-f", files],
        [*kubectl, "wait", "--for=condition=Ready", f"pod/{pod}", "--timeout=10m"],
    ]
    delete_pod = [[*kubectl, "delete", "-f", files]]  # releases a ReadWriteOnce claim
    copies = []
    for path in local_file(config):
        place = PurePosixPath(on_claim(path))
        if str(place.parent) != DATA:
            copies.append([*kubectl, "exec", pod, "--", "mkdir", "-p", str(place.parent)])
        copies.append([*kubectl, "cp", path, f"{pod}:{place}"])
    pods = f"app.kubernetes.io/instance={job.name}"
    return [
        ["docker", "build", "-f", str(folder / "Dockerfile"), "-t", request.image, "."],
        ["docker", "push", request.image],
        *([[*kubectl, "apply", "-f", str(folder / CLAIM)]] if request.create_pvc else []),
        *([*start_pod, *copies, *delete_pod] if copies else []),
        [*kubectl, "apply", "-f", str(folder / "trainjob.yaml")],
        [*kubectl, "wait", "--for=jsonpath={.status.jobsStatus[0].ready}=1", f"trainjob/{job.name}", "--timeout=30m"],
        [*kubectl, "logs", "-f", "--prefix", "--ignore-errors", f"--max-log-requests={request.nodes}", "-l", pods],
        *start_pod,
        [*kubectl, "cp", f"{pod}:{job.run}/final", f"{job.name}-final"],
        *delete_pod,
    ]
