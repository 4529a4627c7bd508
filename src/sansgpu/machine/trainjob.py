"""The address at which a pod of a Kubeflow TrainJob reports its progress."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_PREFIX = "KUBEFLOW_TRAINER_SERVER"


class StatusServer(NamedTuple):
    """The server of Kubeflow Trainer, with the files of the token and of the certificate of its authority."""

    url: str
    token: Path
    ca_cert: str | None


def find_status_server(environment: Mapping[str, str] = os.environ) -> StatusServer | None:
    """Returns the server that Kubeflow Trainer names if its feature TrainJobStatus is enabled, else None."""
    url, token = environment.get(f"{_PREFIX}_URL"), environment.get(f"{_PREFIX}_TOKEN")
    return StatusServer(url, Path(token), environment.get(f"{_PREFIX}_CA_CERT")) if url and token else None
