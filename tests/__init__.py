"""Tests of sansgpu; tests that attack it are in `hostile`, all others in the folder that they test."""

import os
import sys

# Every pytest worker and many of the processes that it starts import all modules, which are to be compiled only once.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
