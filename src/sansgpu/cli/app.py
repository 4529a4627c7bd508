"""The program with all commands, for tools that describe it."""

from __future__ import annotations

from sansgpu.cli.running import build_app

app = build_app()
