"""Atomic writes, bounded reads of foreign files, and who owns a folder."""
