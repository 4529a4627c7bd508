"""Searches of a small configuration in the current folder."""

from pathlib import Path

import yaml


def written(space: object) -> Path:
    file = Path("space.yaml")
    file.write_text(yaml.safe_dump(space, sort_keys=False))
    return file
