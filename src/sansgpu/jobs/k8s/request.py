"""Validates the arguments of `sansgpu k8s` and resolves them to the values of the manifests."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path, PurePosixPath
from posixpath import normpath

import yaml

from sansgpu import __version__
from sansgpu.config import BUILT_IN_NAMES, INPUT_KEYS, Config, ConfigError, acting_values, setting
from sansgpu.config.wording import counted
from sansgpu.jobs.k8s.manifests import DATA, ClusterJob
from sansgpu.jobs.k8s.pod_needs import PodNeeds, needs_of
from sansgpu.machine.probe import threads_of_share
from sansgpu.planning.cluster import require_examples

SHARED_MEMORY_DIVISOR = 8  # /dev/shm may use an eighth of a pod's memory
MIN_BYTES = 1 << 30  # a pod has at least this much memory, and a claim this much storage
MAX_DOMAIN_LENGTH = 253
MAX_NAME_LENGTH = 45  # Kubernetes' 63 without the suffix that operators append, e.g. `-node-0-1234-abcde`

# Kubernetes' quantities: https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity
_QUANTITY = r"\+?([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[mkMGTPE]?|[eE][-+]?[0-9]{1,2})"
_DECIMAL, _BINARY, _LARGEST = "kMGTPE", "KMGTPE", (1 << 63) - 1
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
_INPUT_KEYS = tuple(f"{section}.{key}" for section, keys in INPUT_KEYS.items() for key in keys)
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
    output_dir: Path | None = None

    @property
    def config_name(self) -> str:
        return self.config_file.stem if self.config_file else "default"


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
        name=name,
        namespace=request.namespace,
        image=request.image,
        claim=request.pvc,
        storage=request.create_pvc,
        config=yaml.safe_dump(acting_values(config), sort_keys=False, allow_unicode=True),
        nodes=request.nodes,
        min_nodes=request.min_nodes,
        processes=request.processes_per_node,
        threads=threads,
        cpus=request.cpus,
        memory=request.memory,
        shared_memory=f"{memory // SHARED_MEMORY_DIVISOR >> 20}Mi",
        node_selector=selector,
        allocator=request.allocator,
        openmp=request.openmp,
        grace_seconds=needs.grace_seconds,
    )


def on_claim(path: str) -> str:
    """Returns a path as pods see it. Relative paths are relative to the claim."""
    return normpath(path if path.startswith("/") else f"{DATA}/{path}")


def local_file(config: Config) -> list[str]:
    """Returns the relative input paths of the configuration that exist on this machine."""
    paths = (path for _, path in _paths(config, _INPUT_KEYS) if not path.startswith("/"))
    return [normpath(path) for path in dict.fromkeys(paths) if Path(path).exists()]


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
    for key, path in _paths(config, _INPUT_KEYS + _OUTPUT_KEYS):
        if path.startswith("~") or not f"{on_claim(path)}/".startswith(f"{DATA}/"):
            raise ConfigError(
                f"{key} is {path}, but pods only have the claim, mounted at {DATA}; give a path on it, e.g. "
                f"{PurePosixPath(path).name or 'notes'} or {DATA}/{PurePosixPath(path).name or 'notes'}."
            )


def _as_name(stem: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"
    return name[:MAX_NAME_LENGTH].rstrip("-")


def _require(pattern: str, max_length: int, option: str, value: str, allowed: str) -> None:
    if not re.fullmatch(pattern, value) or len(value) > max_length:
        raise ConfigError(
            f"{option} {value!r} is not a valid Kubernetes name; use {allowed}, {max_length} characters at most."
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
            raise ConfigError(f"--node-selector sets {key} to both {labels[key]} and {value}; leave one out.")
    return labels


def _bytes_of(option: str, size: str) -> int:
    """Parses a Kubernetes quantity such as 64Gi to bytes. Raises ConfigError if it is invalid or out of range."""
    match = re.fullmatch(_QUANTITY, size)
    amount = 0 if match is None else int(Decimal(match[1]) * _factor(match[2]))
    if match is None or amount > _LARGEST:
        raise ConfigError(f"{option} {size[:40]!r} is not a Kubernetes quantity; write e.g. 64Gi.")
    if amount < MIN_BYTES:
        raise ConfigError(f"{option} {size} is {amount:,} bytes, too little for any run; write e.g. 64Gi.")
    return amount


def _factor(suffix: str) -> Decimal:
    if suffix.endswith("i"):
        return Decimal(1024) ** (1 + _BINARY.index(suffix[0]))
    if suffix[:1] in ("e", "E") and len(suffix) > 1:
        return Decimal(10) ** int(suffix[1:])
    return Decimal("0.001") if suffix == "m" else Decimal(1000) ** (1 + _DECIMAL.index(suffix) if suffix else 0)


def _threads(config: Config, request: ClusterRequest) -> int:
    cpus, processes, threads = request.cpus, request.processes_per_node, config.training.threads
    if processes > cpus:
        raise ConfigError(
            f"{processes} processes share {counted(cpus, 'CPU')}; raise --cpus or lower --processes-per-node."
        )
    if threads == "auto":
        return threads_of_share(cpus, processes)
    if threads * processes > cpus:
        total = f"{threads} threads in each of {processes} processes" if processes > 1 else f"{threads} threads"
        raise ConfigError(f"training.threads is {total}, but --cpus is {cpus}; set it to auto or raise --cpus.")
    return threads


def _warn_if_short(needs: PodNeeds, available: int, warn: Callable[[str], None]) -> None:
    if not needs.fit(available):
        warn(
            f"each process needs about {needs.memory / 1e9:.1f} GB of memory, but its share of a pod is "
            f"{available / 1e9:.1f} GB; raise --memory or shrink the run, see `sansgpu plan`."
        )
