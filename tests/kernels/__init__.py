"""Tests of kernels."""

TEST_LIBRARIES = "SANSGPU_TEST_LIBRARIES"  # a folder of kernels to test instead of the installed ones
