"""The notebook in examples/: .ci/run executes it, and readers see what is stored."""

import json

from tests.helpers.paths import REPOSITORY


def test_the_stored_outputs_are_of_one_run_from_top_to_bottom():
  cells = json.loads((REPOSITORY / 'examples' / 'library.ipynb').read_text())['cells']
  code = [cell for cell in cells if cell['cell_type'] == 'code']
  assert [cell['execution_count'] for cell in code] == list(range(1, len(code) + 1))
  kinds = {output['output_type'] for cell in code for output in cell['outputs']}
  assert kinds == {'stream', 'execute_result'}, 'no errors'
  names = {output.get('name') for cell in code for output in cell['outputs']}
  assert 'stderr' not in names
