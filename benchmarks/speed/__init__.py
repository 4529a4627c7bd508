"""The speed and the memory of training on one machine, in pretraining and in its kernels."""
