"""Kubernetes objects of a run as plain dicts: ConfigMap, PyTorchJob, TrainJob, and a pod for copying files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from sansgpu.machine.world import SHUTDOWN_TIMEOUT

Manifest = dict[str, Any]

DATA, CONFIG = "/data", "/etc/sansgpu"  # mount points of the claim and the configuration
USER = 1000  # user of the image, and group that owns the claim's files
# Paths in the image, the same on every architecture.
TCMALLOC, LIBIOMP = "/usr/local/lib/libtcmalloc.so", "/usr/local/lib/libiomp5.so"
PROCESS_RESTARTS = 3  # restarts by torchrun inside a running pod
# Limit of a pod, or of all pods of a TrainJob; lost nodes count only if the operator cannot detect them.
POD_RESTARTS = 10
REAP_SECONDS = 10  # time before the pod ends in which torchrun kills processes that have not saved yet
TMP_SIZE = "8Gi"  # disk for temporary files of the compiler and the Hub client
TRAINER = "trainer.kubeflow.org"


@dataclass(frozen=True)
class ClusterJob:
    """Validated values of the manifests."""

    name: str
    namespace: str | None
    image: str
    claim: str
    storage: str | None  # size of the claim to create; None: it exists
    config: str  # YAML
    nodes: int
    min_nodes: int
    processes: int  # number on each node
    threads: int  # number in each process
    cpus: int
    memory: str
    shared_memory: str
    node_selector: Mapping[str, str]
    allocator: str
    openmp: str
    grace_seconds: int

    @property
    def labels(self) -> dict[str, str]:
        """Labels that select the run's pods under either operator."""
        return {"app.kubernetes.io/name": "sansgpu", "app.kubernetes.io/instance": self.name}

    @property
    def pod_labels(self) -> dict[str, str]:
        """`labels`, and no service mesh sidecar: it would lack guaranteed resources and proxy gloo's connections."""
        return {**self.labels, "sidecar.istio.io/inject": "false"}

    @property
    def access_mode(self) -> str:
        """The access mode that the claim needs."""
        return "ReadWriteMany" if self.nodes > 1 else "ReadWriteOnce"

    @property
    def run(self) -> str:
        """The run folder, shared by all pods."""
        return f"{DATA}/runs/{self.name}"


def config_map(job: ClusterJob) -> Manifest:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(job), "data": {"config.yaml": job.config}}


def volume_claim(job: ClusterJob) -> Manifest:
    """Returns the claim that the pods mount. Its labels lack the run's, because other runs may use it, too."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {**_metadata(job), "name": job.claim, "labels": {"app.kubernetes.io/name": "sansgpu"}},
        "spec": {"accessModes": [job.access_mode], "resources": {"requests": {"storage": job.storage}}},
    }


def pytorch_job(job: ClusterJob) -> Manifest:
    """Returns a PyTorchJob for Kubeflow's Training Operator 1.9: an elastic run with a varying number of pods."""
    worker = {
        "replicas": job.nodes,
        "restartPolicy": "OnFailure",
        "template": {
            "metadata": {"labels": job.pod_labels},
            "spec": _training_pod(job, _container(job, "pytorch", {"command": _command(job), "env": _env(job)})),
        },
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(job),
        "spec": {
            "nprocPerNode": str(job.processes),  # elasticPolicy.nProcPerNode is deprecated, and setting both fails
            # Keep pods for their logs. `Running` would kill pods that are still writing when the first one is done.
            "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": POD_RESTARTS * job.nodes},
            "elasticPolicy": {
                "rdzvBackend": "c10d",
                "minReplicas": job.min_nodes,
                "maxReplicas": job.nodes,
                "maxRestarts": PROCESS_RESTARTS,
            },
            "pytorchReplicaSpecs": {"Worker": worker},
        },
    }


def training_runtime(job: ClusterJob) -> Manifest:
    """Returns the runtime of a TrainJob for Kubeflow Trainer 2. Its pods start and end together."""
    pod = {"restartPolicy": "Never", **_training_pod(job, _container(job, "node", {}))}
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {f"{TRAINER}/trainjob-ancestor-step": "trainer"}},
            "spec": {
                "backoffLimit": 0,  # if a pod fails, all restart from the last snapshot
                "podFailurePolicy": {
                    "rules": [
                        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
                    ]
                },
                "template": {"metadata": {"labels": job.pod_labels}, "spec": pod},
            },
        },
    }
    lost = {
        "name": "pod_lost",  # drained, preempted or evicted, which is not the run's fault
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "apiVersion": f"{TRAINER}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {**_metadata(job), "labels": {**job.labels, f"{TRAINER}/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": POD_RESTARTS, "rules": [lost]},
                    "replicatedJobs": [node],
                }
            },
        },
    }


def train_job(job: ClusterJob) -> Manifest:
    return {
        "apiVersion": f"{TRAINER}/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job),
        "spec": {
            "runtimeRef": {"apiGroup": TRAINER, "kind": "TrainingRuntime", "name": job.name},
            "trainer": {
                "image": job.image,
                "command": _command(job),
                "env": _env(job),
                "numNodes": job.nodes,
                "numProcPerNode": job.processes,
                "resourcesPerNode": _guaranteed(job.cpus, job.memory),
            },
        },
    }


def files_pod(job: ClusterJob) -> Manifest:
    """Returns an idle pod that mounts the claim, for copying data in and the model out."""
    container = {
        "name": "files",
        "image": job.image,
        "command": ["sleep", "infinity"],
        "workingDir": DATA,
        "resources": _guaranteed(1, "1Gi"),
        "securityContext": _confined(),
        "volumeMounts": [{"name": "data", "mountPath": DATA}],
    }
    labels = {"app.kubernetes.io/name": "sansgpu"}  # without the run's, which select its training pods
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**_metadata(job), "name": f"{job.name}-files", "labels": labels},
        "spec": {
            **_pod(job),
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,  # sleep as PID 1 ignores SIGTERM
            "containers": [container],
            "volumes": [_claim(job)],
        },
    }


def _metadata(job: ClusterJob) -> Manifest:
    namespace = {"namespace": job.namespace} if job.namespace else {}
    return {"name": job.name, **namespace, "labels": job.labels}


def _command(job: ClusterJob) -> list[str]:
    """Returns the torchrun command, which the operators configure through PET_* variables. Resumes if it can."""
    train = ["sansgpu", "train", f"{CONFIG}/config.yaml", "--output-dir", job.run, "--resume", "latest", "--headless"]
    return ["torchrun", "-m", *train]


def _env(job: ClusterJob) -> list[Manifest]:
    preloaded = [TCMALLOC] * (job.allocator == "tcmalloc") + [LIBIOMP] * (job.openmp == "libiomp")
    values = {
        "OMP_NUM_THREADS": str(job.threads),
        "LD_PRELOAD": ":".join(preloaded),
        # Intel's default is to spin for 200 ms after every loop, on cores that our other threads need.
        "KMP_BLOCKTIME": "1" if job.openmp == "libiomp" else "",
        SHUTDOWN_TIMEOUT: str(job.grace_seconds - REAP_SECONDS),  # default: 30
        "SANSGPU_CACHE": f"{DATA}/cache",
        "HF_HOME": f"{DATA}/hub",
        "HOME": "/tmp",
        "PYTHONUNBUFFERED": "1",
    }
    return [{"name": name, "value": value} for name, value in values.items() if value]


def _container(job: ClusterJob, name: str, started: Manifest) -> Manifest:
    """Returns the training container. Each operator finds it by `name`; `started` is empty if a TrainJob starts it."""
    mounts = {"data": DATA, "config": CONFIG, "shared-memory": "/dev/shm", "temporary": "/tmp"}
    return {
        "name": name,
        "image": job.image,
        **started,
        "workingDir": DATA,  # relative paths of the configuration are on the claim
        "envFrom": [{"secretRef": {"name": job.name, "optional": True}}],  # Hub or wandb tokens
        "resources": _guaranteed(job.cpus, job.memory),
        "securityContext": _confined(),
        "volumeMounts": [
            {"name": volume, "mountPath": path, **({"readOnly": True} if volume == "config" else {})}
            for volume, path in mounts.items()
        ],
    }


def _training_pod(job: ClusterJob, container: Manifest) -> Manifest:
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": job.labels},
    }
    return {
        **_pod(job),
        "topologySpreadConstraints": [spread],  # pods on one node would share its memory bandwidth
        "terminationGracePeriodSeconds": job.grace_seconds,
        "containers": [container],
        "volumes": [
            _claim(job),
            {"name": "config", "configMap": {"name": job.name}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": job.shared_memory}},
            {"name": "temporary", "emptyDir": {"sizeLimit": TMP_SIZE}},
        ],
    }


def _pod(job: ClusterJob) -> Manifest:
    selector = {"nodeSelector": dict(job.node_selector)} if job.node_selector else {}
    return {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",  # otherwise every start checks every file
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **selector,
    }


def _confined() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _guaranteed(cpus: int, memory: str) -> Manifest:
    """Returns equal requests and limits: the pod is evicted last and may get exclusive cores."""
    amounts = {"cpu": str(cpus), "memory": memory}
    return {"requests": amounts, "limits": amounts}


def _claim(job: ClusterJob) -> Manifest:
    return {"name": "data", "persistentVolumeClaim": {"claimName": job.claim}}


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as blocks, and repeats objects instead of using YAML aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _as_lines(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _as_lines)


def as_yaml(*objects: Manifest) -> str:
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
