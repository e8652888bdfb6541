"""The warnings of a run on the page, read from what it printed."""

from exgrpo_jax.reporting.page.overview import warnings_of


def test_warnings_have_the_step_that_they_name_or_that_was_going_on(tmp_path):
  lines = """
---- 2026-11-23  exgrpo train
WARNING: before the first step
step  1/60 | reward  0.500
WARNING: step 2: half of all is truncated
WARNING: the grader is slow
step  2/60 | reward  0.500
WARNING: step 2: half of all is truncated
WARNING: step 4: the run is killed before the line of its step
step  3/60 | reward  0.500
WARNING: after the last
"""
  (tmp_path / 'console.log').write_text(lines)
  assert [(found['step'], found['text']) for found in warnings_of(tmp_path)] == [
    (1, 'before the first step'),
    (2, 'step 2: half of all is truncated'),
    (2, 'the grader is slow'),
    (3, 'after the last'),
    (4, 'step 4: the run is killed before the line of its step'),
  ]
  assert warnings_of(tmp_path / 'nowhere') == []
