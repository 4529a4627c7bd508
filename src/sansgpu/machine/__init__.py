"""Hardware, memory, processes and collectives. The only package that reads environment variables."""
