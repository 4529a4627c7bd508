"""`sansgpu k8s`: a run on a cluster."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from sansgpu.cli.options import ConfigArgument, JsonOption, OverrideOption, app, print_json, show, warn, written_path


class Allocator(str, Enum):
    """What gives pods memory."""

    TCMALLOC = "tcmalloc"
    NONE = "none"


class OpenMP(str, Enum):
    """What runs a process's threads."""

    LIBGOMP = "libgomp"
    LIBIOMP = "libiomp"


@app.command()
def k8s(
    nodes: Annotated[int, typer.Option(min=1, help="Pods of the run.")],
    cpus: Annotated[int, typer.Option(min=1, help="Whole CPUs of a pod.")],
    memory: Annotated[str, typer.Option(help="Of a pod, as 64Gi.")],
    pvc: Annotated[
        str, typer.Option(help="The claim that has data and keeps snapshots; of several pods ReadWriteMany.")
    ],
    image: Annotated[str, typer.Option(help="Where the image is pushed to and pulled from, with its version.")],
    config: ConfigArgument = None,
    override: OverrideOption = None,
    min_nodes: Annotated[int, typer.Option(min=1, help="Go on while so many are left; PyTorchJob only.")] = 1,
    processes_per_node: Annotated[int, typer.Option(min=1, help="Of a pod, as one for every NUMA node.")] = 1,
    node_selector: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A label that nodes must have. Repeatable.")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="By default that of kubectl's context.")] = None,
    name: Annotated[str | None, typer.Option(help="Of the run; by default the configuration's.")] = None,
    allocator: Annotated[Allocator, typer.Option(help="Preloaded in place of the C library's.")] = Allocator.TCMALLOC,
    openmp: Annotated[OpenMP, typer.Option(help="libiomp: Intel's, preloaded; x86-64 only.")] = OpenMP.LIBGOMP,
    output_dir: Annotated[
        Path | None, typer.Option(parser=written_path, metavar="DIR", help="Folder for the files. Default: k8s/NAME.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a Dockerfile and the manifests of a run by Kubeflow: a PyTorchJob, or a TrainJob.

    Example: sansgpu k8s configs/cpu_80m.yaml --nodes 4 --cpus 16 --memory 64Gi --pvc corpus --image hub/sansgpu:1
    """
    from sansgpu.jobs.cluster_request import ClusterRequest
    from sansgpu.jobs.kubernetes import kubernetes

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
        f"\nPods: {result['nodes']}, each with {result['cpus']} CPUs, {result['memory']}, "
        f"{result['processes_per_node']} x {result['threads']} compute threads and {result['grace_seconds']} s to save "
        "in when it has to go."
    )
    if result["access_mode"] == "ReadWriteMany":
        show(f"The claim {result['claim']} has to be ReadWriteMany, as pods on several nodes mount it.")
    show("\nNext (with Kubeflow Trainer 2 apply trainjob.yaml, and leave out the wait for the PyTorchJob):\n")
    show("\n".join(result["commands"]))
