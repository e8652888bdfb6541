"""Suites of benchmarks, one file each; `--suite=NAME` of evaluate finds them."""
