"""Marks the tests in this folder as `full`, and imports the package's fixtures."""

import pathlib

import pytest

from tests.conftest import (  # noqa: F401
  compiled,
  data,
  make_once,
  one_device,
  recorded,
  session_folder,
  values,
)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items):
  for item in items:
    if item.path.is_relative_to(pathlib.Path(__file__).parent):
      item.add_marker('full')
