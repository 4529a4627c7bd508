"""Atomic writes, bounded reads of untrusted files, and ownership of output folders."""
