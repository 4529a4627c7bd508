"""Runs foreign code and parsers, such as templates and tokenizers, in processes without rights."""
