"""Export of a snapshot as a Hugging Face folder or a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sansgpu.config import PRETRAIN, Config, ConfigError
from sansgpu.config.by_task import SFT
from sansgpu.data.tokenizer import Tokenizer
from sansgpu.jobs.graph_model import is_graph, load_graph
from sansgpu.jobs.loading import is_fine_tuning, load_model
from sansgpu.jobs.report import write_model_card
from sansgpu.jobs.runs import require_run
from sansgpu.models.gguf_file import TYPES, ModelDescription, write_gguf
from sansgpu.models.gguf_tokenizer import TokenizerParts
from sansgpu.models.graph_folder import export_graph_model
from sansgpu.models.huggingface import export_model
from sansgpu.models.layouts import Weights, hugging_face_config, to_hugging_face
from sansgpu.reporting.marks import read_mark
from sansgpu.reporting.outputs import GGUF, require_file, require_folder
from sansgpu.reporting.unmarked import is_unmarked
from sansgpu.tasks.graph import how_learned
from sansgpu.train.run_folders import open_run

_Parts = tuple[dict[str, Any], Weights, TokenizerParts]  # config.json, Hugging Face weights, tokenizer


def export_run(
    run: Path,
    snapshot: str,
    output: Path | None,
    merge: bool | None,
    warn: Callable[[str], None],
    remote_code: bool = False,
) -> Path:
    """Writes a run's snapshot as a Hugging Face folder (default: RUN/export) and returns its path.

    `merge` chooses whether an adapter is merged into the model; None follows the run's configuration. Raises
    ConfigError if this is not a run.
    """
    if (run / "config.json").is_file() and not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} is already a Hugging Face folder; export takes a run.")
    open_run(run)  # raises if it is not a run
    folder = output or run / "export"
    if output is None:
        require_run(run)
    require_folder(folder, "model", "--output")
    _require_no_other_run(folder, run)
    if is_fine_tuning(str(run)):
        _export_fine_tuned(run, snapshot, folder, merge, warn, remote_code)
        return folder
    if is_graph(str(run)):
        _export_graph(run, snapshot, folder, merge, warn)
        return folder
    _require_adapter(merge is None, run)
    loaded = load_model(str(run), snapshot, warn)
    assert loaded.snapshot is not None  # a run's model is one of its snapshots
    export_model(loaded.decoder, loaded.tokenizer, folder)
    write_model_card(run, folder, loaded.snapshot.step, warn)
    return folder


def _require_no_other_run(folder: Path, run: Path) -> None:
    """Raises ConfigError if `folder` is inside another run's folder, e.g. its `final/`."""
    owner = folder.resolve().parent
    mark = read_mark(owner)
    if owner != run.resolve() and ((mark and mark.kind == "run") or is_unmarked(owner, "run")):
        raise ConfigError(f"{folder} belongs to the run {owner}, not to {run}; choose another --output.")


def _require_adapter(has_adapter: bool, run: Path) -> None:
    if not has_adapter:
        raise ConfigError(f"{run} has no adapter; leave out --merge and --no-merge.")


def _export_graph(run: Path, snapshot: str, folder: Path, merge: bool | None, warn: Callable[[str], None]) -> None:
    encoder = load_graph(str(run), snapshot, warn)
    assert encoder.snapshot is not None
    _require_adapter(merge is None, run)
    export_graph_model(encoder.objective.model, encoder.codec, folder, how_learned(encoder.config))
    write_model_card(run, folder, encoder.snapshot.step, warn)


def _export_fine_tuned(
    run: Path, snapshot: str, folder: Path, merge: bool | None, warn: Callable[[str], None], remote_code: bool
) -> None:
    from sansgpu.jobs.fine_tuned import HEADS, load_fine_tuned  # imports transformers

    loaded = load_fine_tuned(str(run), HEADS[open_run(run)[0].kind], snapshot, warn, remote_code)
    _require_adapter(merge is None or loaded.config.model.adapter != "none", run)
    loaded.objective.export_to(loaded.tokenizer, folder, merge)
    if loaded.snapshot is not None:
        write_model_card(run, folder, loaded.snapshot.step, warn)


def export_gguf(
    run: Path, snapshot: str, output: Path | None, kind: str, warn: Callable[[str], None], remote_code: bool = False
) -> Path:
    """Writes a run's snapshot as a GGUF file (default: RUN/NAME-KIND.gguf) and returns its path.

    `kind` is the data type of matrices. Raises ConfigError if llama.cpp does not support the model.
    """
    if kind not in TYPES:
        raise ConfigError(f"--type is {kind}, but must be one of {', '.join(TYPES)}.")
    config, _ = open_run(run)
    if config.kind not in (PRETRAIN, SFT):
        raise ConfigError(f"{run} is a run of task {config.task}, but --format gguf needs one of task pretrain or sft.")
    path = output or run / f"{run.resolve().name}-{kind}.gguf"
    if output is None:
        require_run(run)
    require_file(path, GGUF)
    if config.kind == PRETRAIN:
        step, parts = _pretrained_parts(run, snapshot, warn)
    else:
        step, parts = _fine_tuned_parts(run, snapshot, warn, remote_code)
    unquantized = write_gguf(path, *parts, kind, _about(run, config, step))
    if unquantized:
        warn(
            f"{len(unquantized)} matrices are stored as f16, because their row length is not a multiple of 32; the "
            f"first is {unquantized[0]}"
        )
    return path


def _about(run: Path, config: Config, step: int) -> ModelDescription:
    """Returns the file's metadata, with names only, so that no local paths are published."""
    base = config.model.name_or_path
    return ModelDescription(
        name=run.resolve().name,
        description=f"Step {step} of a run of task {config.task}, trained with sansgpu.",
        dataset=Path(config.data.dataset_name).name,
        base_model=Path(base).name if base else None,
    )


def _pretrained_parts(run: Path, snapshot: str, warn: Callable[[str], None]) -> tuple[int, _Parts]:
    loaded = load_model(str(run), snapshot, warn)
    assert loaded.snapshot is not None
    shape, tokenizer = loaded.decoder.config, loaded.tokenizer
    weights = to_hugging_face(shape, loaded.decoder.state_dict())
    settings = hugging_face_config(shape, tokenizer.end_id)
    return loaded.snapshot.step, (settings, weights, _parts_of(tokenizer))


def _parts_of(tokenizer: Tokenizer) -> TokenizerParts:
    end = tokenizer.end_id
    return TokenizerParts(tokenizer.backend.to_str(), end, end, end, begins=True)  # documents start with it, too


def _fine_tuned_parts(run: Path, snapshot: str, warn: Callable[[str], None], remote_code: bool) -> tuple[int, _Parts]:
    from sansgpu.jobs.fine_tuned import load_fine_tuned  # imports transformers
    from sansgpu.models.pretrained import tokenizer_parts

    loaded = load_fine_tuned(str(run), "causal", snapshot, warn, remote_code)
    assert loaded.snapshot is not None
    model = loaded.objective.whole_model()
    return loaded.snapshot.step, (model.config.to_dict(), model.state_dict(), tokenizer_parts(loaded.tokenizer))
