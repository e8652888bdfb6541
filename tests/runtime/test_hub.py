"""Each Hub name resolves to one commit, and failed downloads and uploads are one-line errors.

The tests run huggingface_hub against a stand-in server.
"""

import json
import re

import pytest
from huggingface_hub import constants

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import hub
from tests.helpers import hub_server

WEIGHTS = bytes(range(256)) * 8000  # 2 MB
DOWN = 'http://127.0.0.1:9'  # the port 'discard', where nothing answers
TOKEN = 'hf_me'  # its user is me, in the organization lab


@pytest.fixture(autouse=True)
def served(tmp_path):
  with hub_server.serving() as server, server.in_use(tmp_path / 'huggingface'):
    server.add('model', 'me/model', {'config.json': '{"a": 1}', 'model.safetensors': WEIGHTS})
    yield server


def fetch(name='me/model', *patterns):
  """Fetch files of a pinned model, by default config.json; return their folder."""
  repository = hub.parse('model', name)
  return hub.fetch(hub.pinned(repository), patterns or ['config.json'])


def weights():
  with open(f'{fetch("me/model", "*")}/model.safetensors', 'rb') as file:
    return file.read()


def refusal(name='me/model', *patterns, status=2):
  """Return the error message of a model that cannot be fetched."""
  with pytest.raises(InputError) as refused:
    fetch(name, *(patterns or ['*']))
  assert '\n' not in str(refused.value) and refused.value.status == status
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
def test_only_owner_and_name_are_parsed_as_a_hub_name(text, parsed):
  assert hub.parse('model', text) == parsed


def test_only_matching_files_are_fetched_and_each_only_once(served, tmp_path):
  folder = fetch()
  assert not any(path.endswith('model.safetensors') for path in served.fetched())
  assert fetch('me/model', '*.safetensors') == folder and folder.startswith(str(tmp_path))
  assert weights() == WEIGHTS
  assert len(served.fetched()) == len(set(served.fetched())) == 2


def test_a_process_resolves_a_name_once_and_prints_the_commit(served, capsys):
  (commit,) = served.repositories['model', 'me/model'].commits
  folder = fetch()
  served.repositories['model', 'me/model'].commit({'config.json': '{"a": 2}'})
  assert fetch() == folder == fetch('me/model@main')
  assert capsys.readouterr().out == f'model me/model: commit {commit}\n'


def test_a_revision_is_a_branch_a_tag_or_a_commit(served):
  found = served.repositories['model', 'me/model']
  (first,) = found.commits
  found.branch('v2', {'config.json': '{"a": 2}'})
  found.commit({'config.json': '{"a": 3}'})
  for revision, value in (('v2', 2), (first, 1), ('main', 3)):
    with open(fetch(f'me/model@{revision}') + '/config.json') as file:
      assert json.load(file) == {'a': value}


def test_a_workdir_records_the_commits_of_names(served, tmp_path):
  folder = fetch()
  hub.record(str(tmp_path))
  served.repositories['model', 'me/model'].commit({'config.json': '{"a": 2}'})
  hub.recall(str(tmp_path))
  assert fetch() != folder  # without a config.json, the workdir contains no run
  (tmp_path / 'config.json').write_text('{}')
  hub.recall(str(tmp_path))
  assert fetch() == folder
  with hub.as_in('nowhere'):  # this folder has no recorded commits
    assert fetch() != folder
  assert fetch() == folder
  (tmp_path / hub.FILE).write_text('{')
  with pytest.raises(InputError, match=r'hub\.json: the run.s Hub commits cannot be read'):
    hub.recall(str(tmp_path))


def test_an_interrupted_download_resumes(served, monkeypatch):
  monkeypatch.setattr(constants, 'DOWNLOAD_CHUNK_SIZE', 500_000)  # the default is 10 MB
  served.cuts['model.safetensors'] = 1_500_000
  assert weights() == WEIGHTS
  gets = [asked[1:] for asked in served.requests if asked[0] == 'GET']
  ranges = [wanted for path, wanted in gets if path.endswith('model.safetensors')]
  assert ranges == [None, 'bytes=1500000-']


def test_progress_bars_are_shown_only_on_terminals(capfd):
  fetch()
  assert capfd.readouterr().err == ''


# ---- Failed downloads ----


def test_a_name_or_a_revision_that_does_not_exist():
  assert re.search(
    r"there is no folder me/modle, .* no public model .* 'hf auth login'", refusal('me/modle')
  )
  assert re.search(r"has no revision 'v9'\. .* http://\S+/me/model", refusal('me/model@v9'))
  assert re.search(r'me/a--b, and this is not a valid Hub name', refusal('me/a--b'))


def test_a_gated_model_without_a_token_and_with_one(served, monkeypatch):
  served.repositories['model', 'me/model'].needs_token = True
  assert re.search(r'Accept its license on http://\S+/me/model\. Then .*HF_TOKEN', refusal())
  monkeypatch.setenv('HF_TOKEN', 'hf_abc')
  assert refusal().endswith('/me/model. Your token does not have access yet.')


def test_offline_the_cache_is_used_and_missing_models_are_named(monkeypatch):
  folder = fetch()
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  with hub.as_in('nowhere'):
    assert fetch() == folder
    for message in (refusal('me/model', '*.safetensors'), refusal('me/other')):
      assert 'is not fully cached in /' in message and 'HF_HUB_OFFLINE is set' in message
      assert message.endswith('a local folder instead, or set HF_ENDPOINT to a mirror of the Hub.')


def test_without_a_network_the_error_names_the_server(monkeypatch):
  folder = fetch()
  monkeypatch.setattr(constants, 'ENDPOINT', DOWN)
  with hub.as_in('nowhere'):
    assert fetch() == folder
    found = rf'me/other is not .* {DOWN} cannot be reached \(ConnectError: .* HF_ENDPOINT'
    assert re.search(found, refusal('me/other', status=1))


def test_a_full_disk(monkeypatch):
  def full(*_, **__):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr('huggingface_hub.file_download.http_get', full)
  assert re.search(r'cannot be downloaded to \S+ \(OSError: .* No space left on', refusal(status=1))


# ---- Publishing ----


@pytest.fixture
def account(served, monkeypatch):
  """The server, with a write token for me and lab, a read token, and others' repositories."""
  served.user(TOKEN, 'me', 'lab')
  served.user('hf_read', 'me', role='read')
  served.add('model', 'you/open', {})
  served.add('model', 'you/secret', {}, private=True)
  served.add('model', 'lab/secret', {}, private=True)
  monkeypatch.setenv('HF_TOKEN', TOKEN)
  return served


FILES = {'model.safetensors': WEIGHTS, 'README.md': b'---\ntags: [x]\n---\n', 'config.json': b'{}'}


def push(name, public=False, files=FILES):
  hub.check_push(name, public)
  return hub.publish(files, name, public, ['model*.safetensors', 'tokenizer*'])


def files_of(repository):
  files = dict(repository.commits[repository.branches['main']])
  assert files.pop('.gitattributes') == b''
  return files


@pytest.mark.parametrize(
  ('name', 'flag', 'private'),
  [('me/new', {}, True), ('lab/new', {'public': True}, False), ('lab/secret', {}, True)],
)
def test_a_push_is_one_commit_to_a_private_repository_unless_it_is_public(
  account, tmp_path, name, flag, private
):
  weights = tmp_path / 'weights'
  weights.write_bytes(WEIGHTS)
  page = push(name, files=FILES | {'model.safetensors': str(weights)}, **flag)
  assert page == f'{account.url}/{name}'
  assert files_of(account.repositories['model', name]) == FILES
  assert account.repositories['model', name].private == private
  assert [pushed for pushed, _ in account.commits] == [name]


def test_a_push_replaces_the_weights_that_are_there_and_keeps_other_files(account):
  shards = {'model-00001-of-00002.safetensors': b'old', 'tokenizer.json': b'old'}
  account.add(
    'model', 'me/policy', shards | {'config.json': b'old', 'LICENSE': b'mine'}, private=True
  )
  push('me/policy')
  assert files_of(account.repositories['model', 'me/policy']) == FILES | {'LICENSE': b'mine'}
  assert len(account.commits) == 1


@pytest.mark.parametrize(
  ('name', 'public', 'token', 'message'),
  [
    ('policy', False, TOKEN, r'the name has no owner\. Write owner/name'),
    ('me/a--b', False, TOKEN, r'this is not a valid name\. Write owner/name'),
    ('me/a@v1', False, TOKEN, r'this is not a valid name'),
    ('me/new', False, '', r"no Hub token was found\. Run 'hf auth login', or set HF_TOKEN"),
    ('me/new', False, 'hf_other', r'nothing was published, because your token was not accepted'),
    ('me/new', False, 'hf_read', r'your token is read-only\. Run'),
    (
      'lab/secret',
      False,
      'hf_read',
      r'your token is read-only\. Run',
    ),
    ('you/new', False, TOKEN, r'your token may not write to you\. Choose one of: me, lab\.'),
    ('you/secret', False, TOKEN, r'your token may not write to you\.'),
    ('you/open', True, TOKEN, r'because your token may not write to this repository'),
    ('lab/secret', True, TOKEN, r'exists and is private\. Remove --public, or choose another'),
    ('me/model', False, TOKEN, r'exists and is public\. Add --public, or choose another'),
  ],
)
def test_a_push_is_rejected_before_anything_is_written(
  account, monkeypatch, name, public, token, message
):
  monkeypatch.setenv('HF_TOKEN', token)
  before = set(account.repositories)
  with pytest.raises(InputError, match=rf'^--push={name}: .*{message}') as refused:
    hub.check_push(name, public)
  assert '\n' not in str(refused.value) and refused.value.status == 2
  assert set(account.repositories) == before
  assert not [path for method, path, _ in account.requests if method == 'POST']


@pytest.mark.parametrize('broken', ['preupload', 'objects/batch', 'commit'])
def test_an_interrupted_push_changes_no_file(account, monkeypatch, broken):
  account.add('model', 'me/policy', {'config.json': b'old'}, private=True)
  account.broken = (broken,)
  monkeypatch.setattr('time.sleep', lambda _: None)  # the library retries
  message = r'^--push=me/policy: nothing was published, because the request to http'
  with pytest.raises(InputError, match=message) as refused:
    push('me/policy')
  assert refused.value.status == 1
  assert files_of(account.repositories['model', 'me/policy']) == {'config.json': b'old'}


def test_a_push_without_a_network(monkeypatch):
  monkeypatch.setenv('HF_TOKEN', TOKEN)
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  with pytest.raises(InputError, match=r'^--push=me/new: HF_HUB_OFFLINE is set'):
    push('me/new')
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
  monkeypatch.setattr(constants, 'ENDPOINT', DOWN)
  message = rf'^--push=me/new: nothing .* {DOWN} failed .ConnectError'
  with pytest.raises(InputError, match=message) as refused:
    push('me/new')
  assert refused.value.status == 1
