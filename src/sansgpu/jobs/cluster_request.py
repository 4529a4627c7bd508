"""What `sansgpu k8s` was asked for, checked before anything is written, and settled."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path, PurePosixPath
from posixpath import normpath

import yaml

from sansgpu import __version__
from sansgpu.config import BUILT_IN_NAMES, Config, ConfigError, acting_values
from sansgpu.jobs.manifests import DATA, ClusterJob
from sansgpu.jobs.pod_needs import Needs, needs_of

MANY_CPUS, SPARED_OF_FEW, SPARED_OF_MANY = 16, 1, 2  # for torchrun, and what prepares batches, writes and sends
SHARED_PART = 8  # of a pod's memory may be files in /dev/shm
LEAST_MEMORY = 1 << 30
LONGEST_DOMAIN = 253
LONGEST_NAME = 45  # Kubernetes' 63, less what operators append: `-node-0-1234-abcde`

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
_LONGEST_IMAGE = 255  # characters of its name
_READ = (
    "data.dataset_name", "data.validation_name", "data.tokenizer", "data.chat_template", "model.name_or_path",
)  # fmt: skip
_WRITTEN = ("data.cache_dir", "training.checkpoint_dir", "training.logging_dir")


@dataclass(frozen=True)
class ClusterRequest:
    """What the command line asked for."""

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
    output_dir: Path | None = None

    @property
    def config_name(self) -> str:
        """Of the configuration, as its file is called."""
        return self.config_file.stem if self.config_file else "default"


def settle(request: ClusterRequest, config: Config, warn: Callable[[str], None]) -> ClusterJob:
    """What the manifests are to say. Raises ConfigError where Kubernetes or the pods could not do it."""
    if request.min_nodes > request.nodes:
        raise ConfigError(f"--min-nodes is {request.min_nodes} of {request.nodes} nodes; give at most --nodes.")
    name = request.name or _as_name(request.config_name)
    _require("[a-z]([-a-z0-9]*[a-z0-9])?", LONGEST_NAME, "--name", name, "a letter, then small letters, digits and -")
    _require(_DOMAIN, LONGEST_DOMAIN, "--pvc", request.pvc, "small letters, digits, - and .")
    if request.namespace is not None:
        _require(_LABEL, 63, "--namespace", request.namespace, "small letters, digits and -")
    _check_image(request.image, warn)
    selector = _node_selector(request.node_selector)
    memory, threads = _bytes_of(request.memory), _threads(config, request)
    _require_pods_can_run(config)
    needs = needs_of(config, threads, request.min_nodes * request.processes_per_node, warn)
    _warn_if_short(needs, memory // request.processes_per_node, warn)
    return ClusterJob(
        name=name,
        namespace=request.namespace,
        image=request.image,
        claim=request.pvc,
        config=yaml.safe_dump(acting_values(config), sort_keys=False, allow_unicode=True),
        nodes=request.nodes,
        min_nodes=request.min_nodes,
        processes=request.processes_per_node,
        threads=threads,
        cpus=request.cpus,
        memory=request.memory,
        shared_memory=f"{memory // SHARED_PART >> 20}Mi",
        node_selector=selector,
        allocator=request.allocator,
        openmp=request.openmp,
        grace_seconds=needs.grace_seconds,
    )


def on_claim(path: str) -> str:
    """Where a pod looks for it: relative paths begin at the claim."""
    return normpath(path if path.startswith("/") else f"{DATA}/{path}")


def lying_here(config: Config) -> list[str]:
    """Files and folders that the configuration reads, and that are on this machine by the same relative path."""
    paths = (path for _, path in _paths(config, _READ) if not path.startswith("/"))
    return [normpath(path) for path in dict.fromkeys(paths) if Path(path).exists()]


def _paths(config: Config, keys: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(key, value) of those that are given; a value may be another name, as of a dataset on the hub."""
    for key in keys:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if value and value not in BUILT_IN_NAMES:
            yield key, value


def _require_pods_can_run(config: Config) -> None:
    """Raise ConfigError where the configuration asks for what pods have not."""
    training = config.training
    if training.device == "cuda" and not training.force_cpu:
        raise ConfigError("device is cuda, which the image's torch has not; set device to cpu.")
    if (backend := training.distributed_backend) != "gloo":
        raise ConfigError(
            f"training.distributed_backend is {backend}, which the image's torch has not; set it to gloo."
        )
    for key, path in _paths(config, _READ + _WRITTEN):
        if path.startswith("~") or not f"{on_claim(path)}/".startswith(f"{DATA}/"):
            raise ConfigError(
                f"{key} is {path}, but pods have only the claim, at {DATA}; give a path on it, as "
                f"{PurePosixPath(path).name or 'notes'} or {DATA}/{PurePosixPath(path).name or 'notes'}."
            )


def _as_name(stem: str) -> str:
    """A name as Kubernetes wants it, of whatever a file is called."""
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}"
    return name[:LONGEST_NAME].rstrip("-")


def _require(pattern: str, longest: int, option: str, value: str, form: str) -> None:
    if not re.fullmatch(pattern, value) or len(value) > longest:
        raise ConfigError(f"{option} {value!r} is no name in Kubernetes; write {form}, {longest} characters at most.")


def _check_image(image: str, warn: Callable[[str], None]) -> None:
    match = re.fullmatch(_IMAGE, image)
    if match is None or len(match["name"]) > _LONGEST_IMAGE:
        raise ConfigError(f"--image {image!r} names no image; write it as registry.example/sansgpu:{__version__}.")
    if match["version"] is None:
        warn(f"{image} has no version, so pods may run different ones; --image {image}:{__version__} would have.")


def _node_selector(given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in given:
        key, _, value = pair.partition("=")
        if not re.fullmatch(rf"({_DOMAIN}/)?{_WORD}=({_WORD})?", pair) or len(key.rpartition("/")[0]) > LONGEST_DOMAIN:
            raise ConfigError(f"--node-selector {pair!r} is no label of nodes; write KEY=VALUE.")
        if found.setdefault(key, value) != value:
            raise ConfigError(f"--node-selector gives {key} as {found[key]} and as {value}; leave one out.")
    return found


def _bytes_of(memory: str) -> int:
    """Bytes of a Kubernetes quantity such as 64Gi. Raises ConfigError if it is none, or too large or too small."""
    match = re.fullmatch(_QUANTITY, memory)
    amount = 0 if match is None else int(Decimal(match[1]) * _factor(match[2]))
    if match is None or amount > _LARGEST:
        raise ConfigError(f"--memory {memory[:40]!r} is no amount in Kubernetes; write it as 64Gi.")
    if amount < LEAST_MEMORY:
        raise ConfigError(f"--memory {memory} is {amount:,} bytes, too few for any run; write it as 64Gi.")
    return amount


def _factor(suffix: str) -> Decimal:
    """The number that a quantity's suffix multiplies by."""
    if suffix.endswith("i"):
        return Decimal(1024) ** (1 + _BINARY.index(suffix[0]))
    if suffix[:1] in ("e", "E") and len(suffix) > 1:
        return Decimal(10) ** int(suffix[1:])
    return Decimal("0.001") if suffix == "m" else Decimal(1000) ** (1 + _DECIMAL.index(suffix) if suffix else 0)


def _threads(config: Config, request: ClusterRequest) -> int:
    """Compute threads of a process, by the configuration or by the CPUs there are."""
    cpus, processes, asked = request.cpus, request.processes_per_node, config.training.threads
    if processes > cpus:
        raise ConfigError(f"{processes} processes share {cpus} CPUs; raise --cpus or lower --processes-per-node.")
    if asked == "auto":
        return max(1, (cpus - (SPARED_OF_FEW if cpus <= MANY_CPUS else SPARED_OF_MANY)) // processes)
    if asked * processes > cpus:
        total = f"{asked} threads of {processes} processes" if processes > 1 else f"{asked} threads"
        raise ConfigError(f"training.threads makes {total} on {cpus} CPUs; set it to auto, or raise --cpus.")
    return asked


def _warn_if_short(needs: Needs, available: int, warn: Callable[[str], None]) -> None:
    if not needs.fit(available):
        warn(
            f"each process needs about {needs.memory / 1e9:.1f} GB and has {available / 1e9:.1f} of its pod's; raise "
            "--memory, or lower what `sansgpu plan` tells."
        )
