"""`sansgpu report` and `runs`."""
