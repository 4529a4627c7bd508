"""A run on a cluster as Kubernetes objects: plain dicts of a configuration map, its jobs and a pod to copy files by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

Manifest = dict[str, Any]

DATA, CONFIG = "/data", "/etc/sansgpu"  # where pods have the claim and the configuration
USER = 1000  # of the image, and the group that owns the claim's files
# Where the image has them on every architecture.
TCMALLOC, LIBIOMP = "/usr/local/lib/libtcmalloc.so", "/usr/local/lib/libiomp5.so"
PROCESS_RESTARTS = 3  # by torchrun, inside a pod that lives
POD_RESTARTS = 10  # of a pod, or of all pods of a TrainJob; lost nodes count only where the operator cannot tell
KILLED_AFTER = 10  # seconds before the pod's end in which torchrun reaps what has not saved by then
TEMPORARY = "8Gi"  # of the node's disk, for what the compiler and the hub write on the way
TRAINER = "trainer.kubeflow.org"


@dataclass(frozen=True)
class ClusterJob:
    """What the manifests say, checked and settled."""

    name: str
    namespace: str | None
    image: str
    claim: str
    config: str  # as YAML
    nodes: int
    min_nodes: int
    processes: int  # of a node
    threads: int  # of a process
    cpus: int
    memory: str
    shared_memory: str
    node_selector: Mapping[str, str]
    allocator: str
    openmp: str
    grace_seconds: int

    @property
    def labels(self) -> dict[str, str]:
        """By which the run's pods are found, whatever operator made them."""
        return {"app.kubernetes.io/name": "sansgpu", "app.kubernetes.io/instance": self.name}

    @property
    def pod_labels(self) -> dict[str, str]:
        """The same, and no proxy of a mesh: that would be a container without guarantees, and between the processes."""
        return {**self.labels, "sidecar.istio.io/inject": "false"}

    @property
    def run(self) -> str:
        """The run's folder, one for all pods."""
        return f"{DATA}/runs/{self.name}"


def config_map(job: ClusterJob) -> Manifest:
    """The configuration."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(job), "data": {"config.yaml": job.config}}


def pytorch_job(job: ClusterJob) -> Manifest:
    """Kubeflow's Training Operator 1.9: an elastic run, whose pods come and go."""
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
            "nprocPerNode": str(job.processes),  # elasticPolicy's own is deprecated, and both are refused
            # Pods stay for their logs. `Running` would end those that still write when the first is done.
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
    """Kubeflow Trainer 2: what the pods of a TrainJob are. They begin and end together."""
    pod = {"restartPolicy": "Never", **_training_pod(job, _container(job, "node", {}))}
    node = {
        "name": "node",
        "template": {
            "metadata": {"labels": {f"{TRAINER}/trainjob-ancestor-step": "trainer"}},
            "spec": {
                "backoffLimit": 0,  # one pod alone cannot go on: all begin anew, from the last snapshot
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
        "name": "pod_lost",  # drained, preempted or evicted: no fault of the run's
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
    """The run itself, of that runtime."""
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
    """A pod that waits, with the claim: data is copied in by it, and the model out."""
    container = {
        "name": "files",
        "image": job.image,
        "command": ["sleep", "infinity"],
        "workingDir": DATA,
        "resources": _guaranteed(1, "1Gi"),
        "securityContext": _confined(),
        "volumeMounts": [{"name": "data", "mountPath": DATA}],
    }
    labels = {"app.kubernetes.io/name": "sansgpu"}  # but not the run's, by which its pods are found
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**_metadata(job), "name": f"{job.name}-files", "labels": labels},
        "spec": {
            **_pod(job),
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,  # sleep heeds no signal
            "containers": [container],
            "volumes": [_claim(job)],
        },
    }


def _metadata(job: ClusterJob) -> Manifest:
    namespace = {"namespace": job.namespace} if job.namespace else {}
    return {"name": job.name, **namespace, "labels": job.labels}


def _command(job: ClusterJob) -> list[str]:
    """What the operators' PET_* variables complete. Begins where there is no snapshot yet, and else goes on."""
    train = ["sansgpu", "train", f"{CONFIG}/config.yaml", "--output-dir", job.run, "--resume", "latest", "--headless"]
    return ["torchrun", "-m", *train]


def _env(job: ClusterJob) -> list[Manifest]:
    preloaded = [TCMALLOC] * (job.allocator == "tcmalloc") + [LIBIOMP] * (job.openmp == "libiomp")
    values = {
        "OMP_NUM_THREADS": str(job.threads),
        "LD_PRELOAD": ":".join(preloaded),
        # By default Intel's threads spin for 200 ms after every loop, on cores that other threads of ours want.
        "KMP_BLOCKTIME": "1" if job.openmp == "libiomp" else "",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.grace_seconds - KILLED_AFTER),  # 30 where it is not set
        "SANSGPU_CACHE": f"{DATA}/cache",
        "HF_HOME": f"{DATA}/hub",
        "HOME": "/tmp",
        "PYTHONUNBUFFERED": "1",
    }
    return [{"name": name, "value": value} for name, value in values.items() if value]


def _container(job: ClusterJob, name: str, started: Manifest) -> Manifest:
    """The same under both operators, each of which finds its container by its name; a TrainJob says what is started."""
    mounts = {"data": DATA, "config": CONFIG, "shared-memory": "/dev/shm", "temporary": "/tmp"}
    return {
        "name": name,
        "image": job.image,
        **started,
        "workingDir": DATA,  # relative paths of the configuration are on the claim
        "envFrom": [{"secretRef": {"name": job.name, "optional": True}}],  # tokens, where there is such a secret
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
        "topologySpreadConstraints": [spread],  # pods on one node share its memory's bandwidth
        "terminationGracePeriodSeconds": job.grace_seconds,
        "containers": [container],
        "volumes": [
            _claim(job),
            {"name": "config", "configMap": {"name": job.name}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": job.shared_memory}},
            {"name": "temporary", "emptyDir": {"sizeLimit": TEMPORARY}},
        ],
    }


def _pod(job: ClusterJob) -> Manifest:
    """Who a pod runs as, and where."""
    selector = {"nodeSelector": dict(job.node_selector)} if job.node_selector else {}
    return {
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",  # else every start looks at every file
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
    """The same asked for and allowed: the pod is the last to be evicted, and may have cores of its own."""
    amounts = {"cpu": str(cpus), "memory": memory}
    return {"requests": amounts, "limits": amounts}


def _claim(job: ClusterJob) -> Manifest:
    return {"name": "data", "persistentVolumeClaim": {"claimName": job.claim}}


class _Dumper(yaml.SafeDumper):
    """Writes what is meant to be read: several lines as lines, and what stands in two places twice."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _as_lines(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _as_lines)


def as_yaml(*objects: Manifest) -> str:
    """Several objects as one file."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
