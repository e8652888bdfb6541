"""Names of the Hub mean one commit, and what cannot be fetched is refused in one line.

Against a stand-in server, through huggingface_hub itself.
"""

import json
import re

import pytest
from huggingface_hub import constants

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import hub
from tests.helpers import hub_server

WEIGHTS = bytes(range(256)) * 8000  # 2 MB


@pytest.fixture(autouse=True)
def served(tmp_path):
  with hub_server.serving() as server, server.in_use(tmp_path / 'huggingface'):
    server.add('model', 'me/model', {'config.json': '{"a": 1}', 'model.safetensors': WEIGHTS})
    yield server


def fetch(name, *patterns):
  """The folder of a pinned model's files."""
  repository = hub.parse('model', name)
  assert repository
  return hub.fetch(hub.pinned(repository), patterns)


def refusal(name='me/model', *patterns):
  """The one line that says why a model cannot be fetched."""
  with pytest.raises(InputError) as refused:
    fetch(name, *(patterns or ['*']))
  assert '\n' not in str(refused.value)
  return str(refused.value)


@pytest.mark.parametrize(
  ('text', 'parsed'),
  [
    ('Qwen/Qwen2.5-1.5B-Instruct', ('model', 'Qwen/Qwen2.5-1.5B-Instruct', '')),
    ('me/model@refs/pr/1', ('model', 'me/model', 'refs/pr/1')),
    *(
      (path, None)
      for path in ('', 'gpt2', './me/model', '~/model', '/me/model', 'a/b/c', 'gs://b/m', 'a/b@')
    ),
  ],
)
def test_owner_and_name_are_a_name_and_all_else_is_a_path(text, parsed):
  assert hub.parse('model', text) == parsed


def test_only_the_files_that_are_wanted_are_fetched_and_each_once(served, tmp_path):
  folder = fetch('me/model', 'config.json')
  assert not any(path.endswith('model.safetensors') for path in served.fetched())
  again = fetch('me/model', '*.safetensors')
  assert again == folder and folder.startswith(str(tmp_path))
  with open(f'{folder}/model.safetensors', 'rb') as file:
    assert file.read() == WEIGHTS
  fetch('me/model', '*')
  assert len(served.fetched()) == len(set(served.fetched())) == 2


def test_a_name_means_one_commit_in_a_process_and_says_which(served, capsys):
  (commit,) = served.repositories['model', 'me/model'].commits
  folder = fetch('me/model', 'config.json')
  served.repositories['model', 'me/model'].commit({'config.json': '{"a": 2}'})
  assert fetch('me/model', 'config.json') == folder == fetch('me/model@main', 'config.json')
  assert capsys.readouterr().out == f'model me/model: commit {commit}\n'


def test_a_revision_is_a_branch_a_tag_or_a_commit(served):
  found = served.repositories['model', 'me/model']
  (first,) = found.commits
  found.branch('v2', {'config.json': '{"a": 2}'})
  found.commit({'config.json': '{"a": 3}'})
  for revision, value in (('v2', 2), (first, 1), ('main', 3)):
    with open(f'{fetch(f"me/model@{revision}", "config.json")}/config.json') as file:
      assert json.load(file) == {'a': value}


def test_a_workdir_keeps_what_names_mean(served, tmp_path):
  folder = fetch('me/model', 'config.json')
  hub.record(str(tmp_path))
  served.repositories['model', 'me/model'].commit({'config.json': '{"a": 2}'})
  hub.recall(str(tmp_path))
  assert fetch('me/model', 'config.json') != folder  # without a config.json no run has begun
  (tmp_path / 'config.json').write_text('{}')
  hub.recall(str(tmp_path))
  assert fetch('me/model', 'config.json') == folder
  with hub.as_in('nowhere'):  # as another run sees it
    assert fetch('me/model', 'config.json') != folder
  assert fetch('me/model', 'config.json') == folder
  (tmp_path / hub.FILE).write_text('{')
  with pytest.raises(InputError, match=r'hub\.json: cannot read the run.s Hub commits'):
    hub.recall(str(tmp_path))


def test_a_broken_connection_is_taken_up_where_it_broke(served, monkeypatch):
  monkeypatch.setattr(constants, 'DOWNLOAD_CHUNK_SIZE', 500_000)  # what is written at once: 10 MB
  served.cuts['model.safetensors'] = 1_500_000
  with open(f'{fetch("me/model", "*")}/model.safetensors', 'rb') as file:
    assert file.read() == WEIGHTS
  ranges = [
    wanted
    for method, path, wanted in served.requests
    if method == 'GET' and path.endswith('model.safetensors')
  ]
  assert ranges == [None, 'bytes=1500000-']


def test_the_bars_of_the_library_are_for_terminals(capfd):
  fetch('me/model', '*')
  assert capfd.readouterr().err == ''


# ---- What cannot be fetched ----


def test_a_name_or_a_revision_that_does_not_exist():
  assert re.search(
    r"there is no folder me/modle, .* no public model .* 'hf auth login'", refusal('me/modle')
  )
  assert re.search(r"has no revision 'v9'\. .* http://\S+/me/model", refusal('me/model@v9'))


def test_a_gated_model_without_a_token_and_with_one(served, monkeypatch):
  served.repositories['model', 'me/model'].needs_token = True
  assert re.search(r'its licence\. Accept it on http://\S+/me/model; .*HF_TOKEN', refusal())
  monkeypatch.setenv('HF_TOKEN', 'hf_abc')
  assert refusal().endswith('the token in use has no access yet.')


def test_offline_the_cache_is_used_and_what_it_lacks_is_named(monkeypatch):
  folder = fetch('me/model', 'config.json')
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  with hub.as_in('nowhere'):
    assert fetch('me/model', 'config.json') == folder
    for message in (refusal('me/model', '*.safetensors'), refusal('me/other')):
      assert 'is not complete in the cache /' in message and 'HF_HUB_OFFLINE is set' in message
      assert message.endswith('a local folder instead, or set HF_ENDPOINT to a mirror of the Hub.')


def test_without_a_network_it_is_said_what_cannot_be_reached(monkeypatch):
  folder = fetch('me/model', 'config.json')
  # The port 'discard', where nothing answers.
  monkeypatch.setattr(constants, 'ENDPOINT', 'http://127.0.0.1:9')
  with hub.as_in('nowhere'):
    assert fetch('me/model', 'config.json') == folder
    found = (
      r'me/other is not .* http://127\.0\.0\.1:9 cannot be reached \(ConnectError: .* HF_ENDPOINT'
    )
    assert re.search(found, refusal('me/other'))


def test_a_full_disk(monkeypatch):
  def full(*_, **__):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr('huggingface_hub.file_download.http_get', full)
  assert re.search(r'cannot be downloaded to \S+ \(OSError: .* No space left on', refusal())
