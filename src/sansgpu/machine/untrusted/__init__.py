"""Runs parsers and library code on untrusted files, e.g. templates and tokenizers, in child processes with limits."""
