"""The commands for clusters: `sansgpu k8s` and `slurm`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sansgpu.cli.options import (
    ConfigArgument,
    JsonOption,
    OverrideOption,
    configuration_names,
    option,
    path_option,
    preparation_bar,
    print_json,
    show,
    warn,
    with_fields,
)


class Allocator(StrEnum):
    """Memory allocators to preload."""

    TCMALLOC = "tcmalloc"
    NONE = "none"


class OpenMP(StrEnum):
    """OpenMP runtimes."""

    LIBGOMP = "libgomp"
    LIBIOMP = "libiomp"


_PODS, _IMAGE, _NODES = "Pods", "Image", "Nodes"


@dataclass(frozen=True, kw_only=True)
class _KubernetesOptions:
    nodes: Annotated[int, option("Number of pods.", _PODS, min=1)]
    cpus: Annotated[int, option("CPUs per pod.", _PODS, min=1)]
    memory: Annotated[str, option("Memory per pod, e.g. 64Gi.", _PODS)]
    pvc: Annotated[
        str,
        option("PersistentVolumeClaim for data and snapshots. Must be ReadWriteMany for more than one node.", _PODS),
    ]
    image: Annotated[str, option("Image reference with a tag, e.g. registry.example/sansgpu:1.", _IMAGE)]
    config: ConfigArgument = None
    override: OverrideOption = None
    create_pvc: Annotated[
        str | None,
        option(
            "Also create the claim, with this size, e.g. 200Gi. Default: the claim must exist.", _PODS, metavar="SIZE"
        ),
    ] = None
    min_nodes: Annotated[
        int, option("Minimum number of pods that the run needs to continue (PyTorchJob only).", _PODS, min=1)
    ] = 1
    processes_per_node: Annotated[int, option("Processes per pod, e.g. one per NUMA node.", _PODS, min=1)] = 1
    node_selector: Annotated[
        list[str] | None, option("Node label required for scheduling. Repeatable.", _PODS, metavar="KEY=VALUE")
    ] = None
    namespace: Annotated[str | None, option("Kubernetes namespace. Default: kubectl's current one.")] = None
    name: Annotated[str | None, option("Run name. Default: the configuration's file name.")] = None
    own_runtime: Annotated[
        bool,
        option(
            "Also write a TrainingRuntime that restarts lost pods, for users who may create one. Default: the TrainJob "
            "uses the cluster's ClusterTrainingRuntime torch-distributed.",
            _PODS,
        ),
    ] = False
    allocator: Annotated[Allocator, option("Memory allocator to preload.", _IMAGE)] = Allocator.TCMALLOC
    openmp: Annotated[OpenMP, option("OpenMP runtime. libiomp is x86-64 only.", _IMAGE)] = OpenMP.LIBGOMP
    output_dir: Annotated[Path | None, path_option("Output folder. Default: k8s/NAME.", "DIR")] = None
    as_json: JsonOption = False


@with_fields
def k8s(given: _KubernetesOptions) -> None:
    """Write a Dockerfile and manifests for Kubernetes.

    The manifests are a TrainJob for Kubeflow Trainer 2, and an elastic PyTorchJob for its predecessor.

    Example: sansgpu k8s configs/cpu_80m.yaml --nodes 4 --cpus 16 --memory 64Gi --pvc corpus --image hub/sansgpu:1
    """
    with preparation_bar() as bar:
        from sansgpu.jobs.k8s import ClusterRequest, kubernetes

        request = ClusterRequest(
            config_file=given.config,
            overrides=given.override or (),
            nodes=given.nodes,
            cpus=given.cpus,
            memory=given.memory,
            pvc=given.pvc,
            image=given.image,
            min_nodes=given.min_nodes,
            processes_per_node=given.processes_per_node,
            node_selector=given.node_selector or (),
            namespace=given.namespace,
            name=given.name,
            allocator=given.allocator.value,
            openmp=given.openmp.value,
            create_pvc=given.create_pvc,
            own_runtime=given.own_runtime,
            output_dir=given.output_dir,
        )
        result = kubernetes(request, bar, warn)
    if given.as_json:
        print_json(result)
    else:
        _show_files(result)


@dataclass(frozen=True, kw_only=True)
class _SlurmOptions:
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG",
            help="Configuration file, preset or name of a file in configs/.",
            autocompletion=configuration_names,
        ),
    ]
    nodes: Annotated[int, option("Number of nodes.", _NODES, min=1)]
    override: OverrideOption = None
    processes_per_node: Annotated[int, option("Processes per node, e.g. one per NUMA node.", _NODES, min=1)] = 1
    cpus: Annotated[int | None, option("CPUs per node. Default: all.", _NODES, min=1)] = None
    memory: Annotated[str | None, option("Memory per node, e.g. 64G. Default: all.", _NODES, metavar="SIZE")] = None
    time: Annotated[str | None, option("Time limit, e.g. 24:00:00 or 2-00.", _NODES, metavar="TIME")] = None
    partition: Annotated[str | None, option("Partition to submit to.", _NODES)] = None
    account: Annotated[str | None, option("Account to charge.", _NODES)] = None
    name: Annotated[str | None, option("Job name. Default: the configuration's file name.")] = None
    output_dir: Annotated[
        Path | None, path_option("Run folder; the script is written there too. Default: runs/NAME.", "DIR")
    ] = None
    as_json: JsonOption = False


@with_fields
def slurm(given: _SlurmOptions) -> None:
    """Write an sbatch script for a Slurm cluster.

    Example: sansgpu slurm configs/cpu_80m.yaml --nodes 4 --cpus 32 --time 24:00:00 --partition cpu
    """
    with preparation_bar() as bar:
        from sansgpu.jobs.slurm import SlurmRequest
        from sansgpu.jobs.slurm import slurm as job

        request = SlurmRequest(
            given.config,
            given.override or (),
            given.nodes,
            given.processes_per_node,
            given.cpus,
            given.memory,
            given.time,
            given.partition,
            given.account,
            given.name,
            given.output_dir,
        )
        result = job(request, bar, warn)
    if given.as_json:
        print_json(result)
        return
    show(
        f"{result['file']}\n\nProcesses save a snapshot and exit {result['grace_seconds']} s before the time limit. "
        "Next steps:\n"
    )
    show("\n".join(result["commands"]))


def _show_files(result: dict[str, Any]) -> None:
    """Prints the written files, the pods and the next commands."""
    from sansgpu.config.wording import counted

    show("\n".join(result["files"]))
    show(
        f"\nPods: {result['nodes']}, each with {counted(result['cpus'], 'CPU')}, {result['memory']} of memory, "
        f"{result['processes_per_node']} x {result['threads']} compute threads and {result['grace_seconds']} s to save "
        "a snapshot before termination."
    )
    claim, mode = result["claim"], result["access_mode"]
    if result["storage"]:
        show(f"claim.yaml creates the claim {claim} of {result['storage']} in the default storage class ({mode}).")
    elif mode == "ReadWriteMany":
        show(f"The claim {claim} must be ReadWriteMany, because pods on several nodes mount it.")
    show("\nNext steps (for the Training Operator 1.9, apply pytorchjob.yaml and skip the wait for the TrainJob):\n")
    show("\n".join(result["commands"]))
