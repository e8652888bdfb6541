"""Where things lie: the clone, what is checked in for the tests, and the real data beside it."""

import pathlib

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
CHECKPOINTS = REPOSITORY / 'tests' / 'checkpoints'  # small ones, in Hugging Face's format
TINY_CONFIG = REPOSITORY / 'tests' / 'helpers' / 'tiny.py'
REAL_DATA = REPOSITORY.parent / 'shared' / 'data'  # tests that need it skip where it is absent
