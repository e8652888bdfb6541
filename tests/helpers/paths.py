"""Paths: the clone, what is checked in for the tests, and the real data beside the clone."""

import pathlib

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
CHECKPOINTS = REPOSITORY / 'tests' / 'checkpoints'  # small ones, in Hugging Face format
TINY_CONFIG = REPOSITORY / 'tests' / 'helpers' / 'tiny.py'
REAL_DATA = REPOSITORY.parent / 'shared' / 'data'  # where it is absent, its tests are skipped
