"""`sansgpu tune`."""
