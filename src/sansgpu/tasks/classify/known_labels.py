"""Keeps the labels of a classifier that is trained further."""

from __future__ import annotations

from dataclasses import replace

from sansgpu.config import ConfigError
from sansgpu.config.paths import local_path
from sansgpu.config.schema import Config
from sansgpu.config.wording import counted, truncate
from sansgpu.models.formats.folders import base_of, has_architecture
from sansgpu.models.huggingface.source import own_labels, pretrained_config
from sansgpu.tasks.classify.labels import Labels

HEAD_CLASS = "ForSequenceClassification"  # ending of the class of transformers' classifiers


def with_labels_of_model(labels: Labels, config: Config) -> Labels:
    """Returns the labels in the order of the classifier that is trained further, if some are the same.

    Its labels keep their ids and rows of the head, and new ones are added at the end. Raises ConfigError if there are
    new ones, but the classifier is an adapter, whose head cannot grow.
    """
    known, cells = _labels_of_model(config), labels.cells
    shared = {*known} & {*labels.names}
    if config.data.labels is not None or known == labels.names or not shared or (cells and cells.kind == "vector"):
        return labels
    name, names = config.model.name_or_path, (*known, *(name for name in labels.names if name not in shared))
    added = truncate(", ".join(names[len(known) :]))
    if added and base_of(config.model) is not None:
        raise ConfigError(
            f"{name} is an adapter with the labels {truncate(', '.join(known))}, and cannot get new ones ({added}); "
            "export it merged first, or remove these rows."
        )
    absent = truncate(", ".join(name for name in known if name not in shared))
    changes = "".join([f"; added: {added}" if added else "", f"; in no row: {absent}" if absent else ""])
    return replace(
        labels,
        names=names,
        notes=(*labels.notes, f"{name}: its {counted(len(known), 'label')} keep their ids{changes} (data.labels)."),
    )


def _labels_of_model(config: Config) -> tuple[str, ...]:
    """Returns the labels of the base model if it classifies texts and names them."""
    name = str(config.model.name_or_path)
    base = pretrained_config(config.model)
    classes = getattr(base, "architectures", None) or ()
    is_classifier = has_architecture(local_path(name), HEAD_CLASS) or any(c.endswith(HEAD_CLASS) for c in classes)
    names = own_labels(base) if is_classifier else ()
    return names if len(names) > 1 and getattr(base, "problem_type", None) != "regression" else ()
