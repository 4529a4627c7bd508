"""Every row of docs/guides.md works: what other guides show, with the names that replace theirs here."""

import re
from pathlib import Path

import pytest

from tests.guides import tries
from tests.guides.tries import PAGE, Try, says, settings_load
from tests.processes import use_cache
from tests.project import ROOT

CELLS = [row for row in re.findall(r"^\| (.+?) \| .+ \|$", PAGE, re.MULTILINE) if row != "theirs"]
_MACHINE = "machine/test_machine.py"
# What tries each row, by the beginning of its left cell: a function of tries.py, or a test of another file.
TRIED: dict[str, Try | str] = {
    "`python scripts/train.py": tries.train_script,
    "`ModelConfig(...)`": tries.sections,
    "`device`, `force_cpu`": tries.devices,
    "`config.copy()`": tries.assigned_fields,
    "`for epoch in": tries.epochs,
    "`TransformerLM(config)`": tries.forward_pass,
    "a loop of your own": tries.own_loop,
    "`use_amp: false`": tries.no_amp,
    "`torchrun --nproc_per_node=4": "scale/test_runs.py::test_losses_do_not_depend_on_the_number_of_processes",
    "`distributed_backend`": tries.per_process,
    "too much memory": settings_load(
        "training.batch_size=1", "data.pack_sequences=false", "model.d_model=128", "model.max_seq_len=256"
    ),
    "slow:": settings_load(
        "training.threads=2", "training.dataloader_num_workers=1", "data.preprocessing_num_workers=1",
        "data.max_length=256",
    ),
    "hanging:": settings_load(
        "training.dataloader_num_workers=0", "training.dataloader_prefetch_factor=1", "data.timeout_seconds=60"
    ),
    "poor convergence": settings_load("training.learning_rate=0.001", "training.warmup_steps=500"),
    "errors:": settings_load(
        "training.use_amp=false", "training.distributed_backend=nccl", "training.dataloader_num_workers=0"
    ),
    "`psutil`": tries.measured_while_training,
    "`report_to=": tries.tensorboard,
    "`trainer.state.log_history": tries.log_history,
    "a random search": tries.search_space,
    "memory by model size": tries.presets,
    "hours by processor": tries.presets,
    "from CPU to GPU": tries.cpu_and_gpu,
    "width 768": tries.graph_sizes,
    "160 documents": settings_load("data.validation_split=0.2"),
    "seconds per step": "tasks/graph/test_graph_runs.py::test_events_report_metrics_of_tokens_and_leaves",
    "projections": "planning/test_bench_options.py::test_projections_count_from_the_start",
    "a comparison with a GPU": says("bench.md", "--gpu-tflops"),
    "bottlenecks": says("bench.md", "compares each part of a step with the limits"),
    "what if": tries.variations,
    "a configuration with windows of 128": tries.short_windows,
    "6 to 8 GB of memory": tries.graph_memory,
    "`python run_qa.py": tries.run_qa,
    "`TrainingArguments(": tries.training_arguments,
    "one process for each socket": "scale/test_runs.py::test_mpirun_is_one_run",
    "an image with tcmalloc": "jobs/k8s/test_image.py::test_preloaded_libraries_are_in_the_image",
    "an elastic PyTorchJob": "jobs/k8s/test_manifests.py::test_a_pytorchjob_is_elastic",
    "cores that are left": says("kubernetes.md", "Leave cores for the kubelet", "allocatable"),
    "`LOGLEVEL`": tries.loglevel,
    "caches of the Hub": "jobs/k8s/test_manifests.py::test_all_persistent_data_is_on_the_volume_claim",
    "`kubectl create`": says("kubernetes.md", "kubectl get pods -l", "kubectl logs -f", "kubectl delete"),
    "supervised fine-tuning": "jobs/test_real_model.py::test_a_bakery_s_answers_are_learned",
    "`CUBLAS_WORKSPACE_CONFIG`": f"{_MACHINE}::test_a_process_begins_with_its_randomness_settled_before_torch_is_there",
    "two runs": "train/test_resume.py::test_sigkill_at_a_random_moment",
    "`sampling.stream: true`": tries.streaming,
    "`make train-smoke`": tries.smoke,
    "`-f models/nano.yaml": tries.oxidizr_flags,
    "`trainer: {batch_size": tries.oxidizr_keys,
    "the authors'": tries.authors_nano,
    "nano (83M parameters)": tries.nano_size,
    "the same on a GPU": tries.on_gpu,
}  # fmt: skip


def test_every_row_of_the_page_is_tried() -> None:
    rows = [[begin for begin in TRIED if cell.startswith(begin)] for cell in CELLS]
    assert [cell for cell, found in zip(CELLS, rows, strict=True) if len(found) != 1] == []
    assert [begin for [begin] in rows] == list(TRIED)


@pytest.mark.parametrize("begin", TRIED)
def test_a_row_of_a_guide_works(begin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cache(monkeypatch, tmp_path / "cache")
    tried = TRIED[begin]
    if isinstance(tried, str):
        file, _, name = tried.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")
    else:
        tried(tmp_path)
