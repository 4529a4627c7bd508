"""The training tasks. Each task is a folder here with all its code, and one line in `configuration.py`."""
