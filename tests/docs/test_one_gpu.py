"""The page about one GPU is made by the command's formulas."""

from tests.docs import documents


def test_the_page_checked_in_is_the_one_that_is_made():
  made = documents.load('one_gpu')
  assert made.page() == made.PAGE.read_text(encoding='utf-8'), (
    'docs/one_gpu.md is out of date; run: python docs/one_gpu.py'
  )
