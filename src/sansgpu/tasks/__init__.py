"""Training tasks. Each is a folder with everything about its kind of run, and one line in `config.tasks`."""
