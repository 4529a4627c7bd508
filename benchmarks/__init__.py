"""What the README claims, re-runnable: sansgpu beside its peers, in one run on one machine."""
