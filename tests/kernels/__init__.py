"""Tests of kernels."""

TEST_LIBRARIES = "SANSGPU_TEST_LIBRARIES"  # names a folder with other kernels than the installed ones
