"""Runs code that is not ours: parsers and libraries on untrusted files in child processes with limits, and user code."""
