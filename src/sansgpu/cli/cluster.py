"""The `sansgpu k8s` command."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from sansgpu.cli.options import ConfigArgument, JsonOption, OverrideOption, app, print_json, show, warn, written_path


class Allocator(str, Enum):
    """Memory allocators to preload."""

    TCMALLOC = "tcmalloc"
    NONE = "none"


class OpenMP(str, Enum):
    """OpenMP runtimes."""

    LIBGOMP = "libgomp"
    LIBIOMP = "libiomp"


@app.command()
def k8s(
    nodes: Annotated[int, typer.Option(min=1, help="Number of pods.")],
    cpus: Annotated[int, typer.Option(min=1, help="CPUs per pod.")],
    memory: Annotated[str, typer.Option(help="Memory per pod, e.g. 64Gi.")],
    pvc: Annotated[
        str, typer.Option(help="PersistentVolumeClaim for data and snapshots; ReadWriteMany for several pods.")
    ],
    image: Annotated[str, typer.Option(help="Image reference with a tag, e.g. registry.example/sansgpu:1.")],
    config: ConfigArgument = None,
    override: OverrideOption = None,
    min_nodes: Annotated[int, typer.Option(min=1, help="Minimum pods for the run to continue (PyTorchJob only).")] = 1,
    processes_per_node: Annotated[int, typer.Option(min=1, help="Processes per pod, e.g. one per NUMA node.")] = 1,
    node_selector: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Node label required for scheduling. Repeatable.")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace. Default: kubectl's current one.")] = None,
    name: Annotated[str | None, typer.Option(help="Run name. Default: the configuration's file name.")] = None,
    allocator: Annotated[Allocator, typer.Option(help="Memory allocator to preload.")] = Allocator.TCMALLOC,
    openmp: Annotated[OpenMP, typer.Option(help="OpenMP runtime. libiomp is x86-64 only.")] = OpenMP.LIBGOMP,
    output_dir: Annotated[
        Path | None, typer.Option(parser=written_path, metavar="DIR", help="Output folder. Default: k8s/NAME.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a Dockerfile and Kubeflow manifests (PyTorchJob and TrainJob) to train on Kubernetes.

    Example: sansgpu k8s configs/cpu_80m.yaml --nodes 4 --cpus 16 --memory 64Gi --pvc corpus --image hub/sansgpu:1
    """
    from sansgpu.jobs.k8s import kubernetes
    from sansgpu.jobs.k8s.request import ClusterRequest

    result = kubernetes(
        ClusterRequest(
            config_file=config,
            overrides=override or (),
            nodes=nodes,
            cpus=cpus,
            memory=memory,
            pvc=pvc,
            image=image,
            min_nodes=min_nodes,
            processes_per_node=processes_per_node,
            node_selector=node_selector or (),
            namespace=namespace,
            name=name,
            allocator=allocator.value,
            openmp=openmp.value,
            output_dir=output_dir,
        ),
        warn,
    )
    if as_json:
        print_json(result)
        return
    show("\n".join(result["files"]))
    show(
        f"\nPods: {result['nodes']}, each with {result['cpus']} CPUs, {result['memory']} of memory, "
        f"{result['processes_per_node']} x {result['threads']} compute threads and {result['grace_seconds']} s to save "
        "a snapshot before termination."
    )
    if result["access_mode"] == "ReadWriteMany":
        show(f"The claim {result['claim']} must be ReadWriteMany, because pods on several nodes mount it.")
    show("\nNext steps (for Kubeflow Trainer 2, apply trainjob.yaml and skip the wait for the PyTorchJob):\n")
    show("\n".join(result["commands"]))
