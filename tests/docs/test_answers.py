"""The verifier that docs/answers.md shows can be used as it says."""

import dataclasses

from exgrpo_jax.grading import pool, verifier
from tests.docs import documents
from tests.helpers import tiny

PAGE = (documents.DOCS / 'answers.md').read_text()


def test_the_verifier_of_the_page_decides(tmp_path, monkeypatch):
  (block,) = documents.blocks(PAGE, 'python')
  (tmp_path / 'my_verifier.py').write_text(block)
  monkeypatch.syspath_prepend(str(tmp_path))
  assert '--config.grading.verifier=my_verifier:LastLine' in PAGE
  config = dataclasses.replace(tiny.GRADING, workers=1, verifier='my_verifier:LastLine')
  with pool.Grader(config, verifier.ANYTHING) as running:
    verdicts = running.grade(['1\n2</think>\n3', '2'], ['3', '3'])
  assert [(verdict.outcome, verdict.answer) for verdict in verdicts] == [
    ('correct', '3'),
    ('wrong', '2'),
  ]


def test_the_page_lists_every_kind_and_verifier():
  for name in (*verifier.KINDS, *verifier.NAMES):
    assert f'| `{name}` |' in PAGE
