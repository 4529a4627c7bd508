"""Runs code that is not ours: parsers of untrusted files, in child processes with limits, and the code of users."""
