"""Training: loop, optimizer, schedule, snapshots and evaluation."""
