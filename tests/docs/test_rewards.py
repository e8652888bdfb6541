"""The rewards that docs/rewards.md shows can be used as it says."""

import dataclasses
import http.server
import json
import re
import threading

import pytest

from exgrpo_jax.grading import pool, reward_functions, rewards, settings, verifier
from tests.docs import documents
from tests.helpers import tiny

PAGE = documents.DOCS / 'rewards.md'
VERIFIER = verifier.Config(require_think=False, require_box=True)


class Judge(http.server.BaseHTTPRequestHandler):
  """The service of the page: a response scores its length and its question's."""

  def do_POST(self):
    asked = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
    scores = [len(q) + len(r) for q, r in zip(asked['questions'], asked['responses'], strict=True)]
    self.send_response(200)
    self.end_headers()
    self.wfile.write(json.dumps({'scores': scores}).encode())

  def log_message(self, *_):
    """Prints nothing."""


@pytest.fixture
def port():
  """That of a running Judge."""
  with http.server.ThreadingHTTPServer(('localhost', 0), Judge) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


@pytest.fixture
def configs(tmp_path, monkeypatch, port):
  """The grading of each of the page's commands; what they import can be imported."""
  for block in documents.blocks(PAGE.read_text(), 'python'):
    name = re.match(r'"""(\w+\.py)', block)[1]
    (tmp_path / name).write_text(block.replace(':8000', f':{port}'))
  monkeypatch.syspath_prepend(str(tmp_path))
  found = []
  for command in documents.commands(PAGE):
    flags = dict(re.findall(r'config\.grading\.(\w+)="?([^"\s]*)"?', command.text))
    if 'exgrpo train' in command.text:
      changes = {'rewards': flags['rewards'], 'weights': flags['weights']}
      changes = {
        name: tuple(json.loads(f'[{text[1:-1]}]'.replace("'", '"')))
        for name, text in changes.items()
      }
      changes['batched'] = (flags['batched'],) if 'batched' in flags else ()
      found.append(dataclasses.replace(tiny.GRADING, workers=1, **changes))
  return found


def test_the_rewards_of_the_page_can_be_used(configs):
  facts = {'question': 'four', 'length': 16, 'max_response': 64, 'level': 3}
  expected = [1.0, 1 + 0.2 * 0.75 + 0.1 * 3, 1 + 0.3 * (4 + len(r'\boxed{1}'))]
  for config, reward in zip(configs, expected, strict=True):
    settings.check_rewards(config, 64)
    pool.check(config, VERIFIER)
    pool.check(config, VERIFIER, {'question': 'four', 'messages': []})
    with pool.Grader(config, VERIFIER) as running:
      (verdict,) = running.grade([r'\boxed{1}'], ['1'], facts=[lambda: facts])
    assert verdict.reward == pytest.approx(reward)


def test_the_page_lists_every_reward_and_parameter():
  tables = [line.split('|')[1] for line in PAGE.read_text().splitlines() if line[:3] == '| `']
  named = re.findall(r'`(\w+)`', ' '.join(tables))
  assert named == [*rewards.BUILT_IN, *reward_functions.PARAMETERS]
