"""Writes the Dockerfile and the Kubernetes manifests of a run."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from jinja2 import Environment, PackageLoader

from sansgpu import __version__
from sansgpu.config import Config, ConfigError, load_config
from sansgpu.data.shards import ReportProgress
from sansgpu.files.atomic import write_failures_as
from sansgpu.files.ownership import replace_folder
from sansgpu.jobs.k8s import manifests
from sansgpu.jobs.k8s.manifests import ClusterJob, as_yaml
from sansgpu.jobs.k8s.pod_needs import ESTIMATING
from sansgpu.jobs.k8s.request import ClusterRequest, local_file, on_claim, resolve_request
from sansgpu.train.run_folders import require_plain_name

PYTHON_IMAGE = "python:3.12.12-slim-bookworm"
INTEL_OPENMP = "intel-openmp==2026.2.0"
RECIPE = ("Dockerfile", "Dockerfile.dockerignore")
CLAIM = "claim.yaml"


def kubernetes(request: ClusterRequest, progress: ReportProgress, warn: Callable[[str], None]) -> dict[str, Any]:
    """Writes the files and returns their summary and the next commands. Raises ConfigError."""
    config, notes = load_config(request.config_file, request.overrides, find_beside=False)  # paths on the claim
    for note in notes:
        warn(note)
    progress(ESTIMATING, 0, 0)
    job = resolve_request(request, config, warn)
    folder = request.output_dir or Path("k8s") / request.config_name
    require_plain_name(folder)
    texts = _texts(job, config, folder)
    _write(folder, texts)
    return _summary(job, config, folder, [str(folder / name) for name in texts])


def _texts(job: ClusterJob, config: Config, folder: Path) -> dict[str, str]:
    configuration = manifests.config_map(job)
    return {
        **_recipe(job, config, folder),
        "pytorchjob.yaml": as_yaml(configuration, manifests.pytorch_job(job)),
        "trainjob.yaml": as_yaml(configuration, manifests.training_runtime(job), manifests.train_job(job)),
        "files.yaml": as_yaml(manifests.files_pod(job)),
        **({CLAIM: as_yaml(manifests.volume_claim(job))} if job.storage else {}),
    }


def _recipe(job: ClusterJob, config: Config, folder: Path) -> dict[str, str]:
    templates = Environment(loader=PackageLoader("sansgpu.jobs.k8s"), keep_trailing_newline=True)
    facts = {
        "path": shlex.quote((folder / "Dockerfile").as_posix()),
        "image": job.image,
        "base": PYTHON_IMAGE,
        "version": __version__,
        "torch": torch.__version__.partition("+")[0],  # the installed version, which is tested
        "intel_openmp": INTEL_OPENMP,
        "packages": ["g++", "libgomp1", *(["libtcmalloc-minimal4"] if job.allocator == "tcmalloc" else [])],
        "extras": ["hf", "report", *config.training.report_to],
        "allocator": job.allocator,
        "openmp": job.openmp,
        "tcmalloc": manifests.TCMALLOC,
        "libiomp": manifests.LIBIOMP,
        "user": manifests.USER,
        "data": manifests.DATA,
    }
    return {name: templates.get_template(name).render(facts) for name in RECIPE}


def _write(folder: Path, texts: dict[str, str]) -> None:
    option = "--output-dir"
    with write_failures_as(ConfigError, folder, option), replace_folder(folder, "cluster", option) as new:
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")


def _summary(job: ClusterJob, config: Config, folder: Path, files: list[str]) -> dict[str, Any]:
    return {
        "name": job.name,
        "namespace": job.namespace,
        "files": files,
        "nodes": job.nodes,
        "min_nodes": job.min_nodes,
        "processes_per_node": job.processes,
        "threads": job.threads,
        "cpus": job.cpus,
        "memory": job.memory,
        "grace_seconds": job.grace_seconds,
        "claim": job.claim,
        "storage": job.storage,
        "access_mode": job.access_mode,
        "run": job.run,
        "commands": [shlex.join(command) for command in _commands(job, config, folder)],
    }


def _commands(job: ClusterJob, config: Config, folder: Path) -> list[list[str]]:
    """Returns the next commands, e.g. build the image, copy local data, start the run, copy the model."""
    kubectl = ["kubectl", *(["--namespace", job.namespace] if job.namespace else [])]
    pod, files = f"{job.name}-files", str(folder / "files.yaml")
    start_pod = [
        [*kubectl, "apply", "-f", files],
        [*kubectl, "wait", "--for=condition=Ready", f"pod/{pod}", "--timeout=10m"],
    ]
    delete_pod = [[*kubectl, "delete", "-f", files]]  # releases a ReadWriteOnce claim
    copies = []
    for path in local_file(config):
        place = PurePosixPath(on_claim(path))
        if str(place.parent) != manifests.DATA:
            copies.append([*kubectl, "exec", pod, "--", "mkdir", "-p", str(place.parent)])
        copies.append([*kubectl, "cp", path, f"{pod}:{place}"])
    pods = f"app.kubernetes.io/instance={job.name}"
    return [
        ["docker", "build", "-f", str(folder / "Dockerfile"), "-t", job.image, "."],
        ["docker", "push", job.image],
        *([[*kubectl, "apply", "-f", str(folder / CLAIM)]] if job.storage else []),
        *([*start_pod, *copies, *delete_pod] if copies else []),
        [*kubectl, "apply", "-f", str(folder / "pytorchjob.yaml")],
        [*kubectl, "wait", "--for=condition=Running", f"pytorchjob/{job.name}", "--timeout=30m"],
        [*kubectl, "logs", "-f", "--prefix", "--ignore-errors", f"--max-log-requests={job.nodes}", "-l", pods],
        *start_pod,
        [*kubectl, "cp", f"{pod}:{job.run}/final", f"{job.name}-final"],
        *delete_pod,
    ]
