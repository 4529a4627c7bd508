"""The jobs behind the commands, mostly one module per command."""
