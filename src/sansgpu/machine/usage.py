"""What this process uses now."""

from __future__ import annotations

import psutil


class Usage:
    """Memory and processor use of this process; `cpu_percent` is since the last call, 100 per busy core."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()

    def rss_bytes(self) -> int:
        """Resident memory."""
        resident: int = self._process.memory_info().rss
        return resident

    def cpu_percent(self) -> float:
        """Processor use since the last call."""
        percent: float = self._process.cpu_percent()
        return percent
