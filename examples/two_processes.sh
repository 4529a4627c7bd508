#!/usr/bin/env bash
# Trains with two processes on this machine. The loss curve is the same as with one process.
set -e
sansgpu train configs/tiny.yaml --processes 2 --max-steps 10 --output-dir runs/two-processes
# torchrun starts the same run on several machines (docs/scaling.md):
# torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint HOST:29400 -m sansgpu train CONFIG --output-dir runs/nodes
