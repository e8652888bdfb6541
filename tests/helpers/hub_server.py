"""A stand-in for the Hugging Face Hub: as much of its HTTP interface as huggingface_hub uses.

What it cannot stand in for: Xet storage, redirects to other hosts, real sizes and speeds.
"""

import base64
import contextlib
import dataclasses
import hashlib
import http.server
import json
import os
import re
import threading
import urllib.parse
from unittest import mock

from huggingface_hub import constants

from exgrpo_jax.runtime import hub as registry

_API = re.compile(r'/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?')
_WRITE = re.compile(r'/api/models/([^/]+/[^/]+)/(preupload/main|commit/main|auth-check/write)')
_BATCH = re.compile(r'/([^/]+/[^/]+)\.git/info/lfs/objects/batch')
_FILE = re.compile(r'/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+|refs%2F[^/]+)/(.+)')


@dataclasses.dataclass
class Repository:
  """What the server has under one name."""

  commits: dict[str, dict[str, bytes]]  # commit -> path -> content
  branches: dict[str, str]  # name -> commit
  needs_token: bool = False  # to read anything but README.md
  private: bool = False  # only its owner sees it

  def commit(self, content):
    """Moves main to a new commit with these files; returns its hash."""
    return self.branch('main', content)

  def branch(self, name, content):
    files = {'.gitattributes': b''}  # as every repository has
    for path, text in content.items():
      files[path] = text.encode() if isinstance(text, str) else text
    sha = hashlib.sha1(repr((name, sorted(files.items()))).encode()).hexdigest()
    self.commits[sha] = files
    self.branches[name] = sha
    return sha


class Hub:
  """Repositories by (kind, name), and what was asked of them."""

  def __init__(self):
    self.repositories = {}
    self.requests = []  # (method, path, the Range asked for)
    self.users = {}  # token -> what whoami says of its user, see `user`
    self.commits = []  # (name, summary) of each commit that was pushed
    self.objects = {}  # sha256 -> content of a large file that was uploaded
    self.broken = ()  # parts of paths that are answered with status 500
    self.cuts = {}  # path of a file -> after how many bytes its next response breaks off
    self.url = ''

  def add(self, kind, name, content, **settings):
    """A repository with one commit on main."""
    repository = self.repositories[kind, name] = Repository({}, {}, **settings)
    repository.commit(content)
    return repository

  def user(self, token, name, *organizations, role='write'):
    """Lets a token write as a user and its organizations."""
    self.users[token] = {
      'name': name,
      'orgs': [{'name': one} for one in organizations],
      'auth': {'accessToken': {'role': role}},
    }

  def fetched(self):
    """The files that were asked for, without those that were only looked up."""
    return [
      path.rpartition('/resolve/')[2]
      for method, path, _ in self.requests
      if method == 'GET' and '/resolve/' in path
    ]

  @contextlib.contextmanager
  def in_use(self, folder):
    """In the block this process, and those that it starts, use it with a cache in `folder`."""
    patched = {
      'ENDPOINT': self.url,
      'HUGGINGFACE_CO_URL_TEMPLATE': f'{self.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}',
      'HF_HUB_CACHE': str(folder / 'hub'),
      'HF_TOKEN_PATH': str(folder / 'token'),
      'HF_HUB_DISABLE_XET': True,
    }
    environment = {'HF_ENDPOINT': self.url, 'HF_HOME': str(folder), 'HF_TOKEN': ''}
    environment['HF_HUB_DISABLE_XET'] = '1'
    with (
      mock.patch.multiple(constants, **patched),  # read from the environment at its import
      mock.patch.dict(os.environ, environment),
      registry.as_in(folder),  # nothing is known yet of what names mean
    ):
      yield self


@contextlib.contextmanager
def serving():
  """A Hub that answers on a port of its own while the block runs."""
  hub = Hub()
  handler = type('Handler', (_Handler,), {'hub': hub})
  server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
  hub.url = f'http://127.0.0.1:{server.server_port}'
  thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
  thread.start()
  try:
    yield hub
  finally:
    server.shutdown()
    server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = 'HTTP/1.1'
  hub: Hub

  def log_message(self, *arguments):
    pass

  def do_HEAD(self):
    self._answer()

  def do_GET(self):
    self._answer()

  def do_PUT(self):
    content = self.rfile.read(int(self.headers['Content-Length']))
    self.hub.objects[hashlib.sha256(content).hexdigest()] = content
    self._send(b'', {})

  def do_POST(self):
    body = self.rfile.read(int(self.headers.get('Content-Length', 0)))
    path = self.path.partition('?')[0]
    self.hub.requests.append((self.command, path, None))
    if any(part in path for part in self.hub.broken):
      self._refuse(500, '')
    elif path == '/api/validate-yaml':
      self._send_json({'errors': [], 'warnings': []})
    elif path == '/api/repos/create':
      self._create(**json.loads(body))
    elif match := _BATCH.fullmatch(path):
      if self._may_write(match[1]):
        href = {'upload': {'href': f'{self.hub.url}/objects'}}
        objects = [one | {'actions': href} for one in json.loads(body)['objects']]
        self._send_json({'objects': objects})
    elif (match := _WRITE.fullmatch(path)) and self._may_write(match[1]):
      push = self._preupload if match[2].startswith('preupload') else self._push
      push(match[1], body)

  def _create(self, name, organization, visibility='public', **_):
    full = f'{organization}/{name}'
    if not self._may_write(full):
      return
    exists = ('model', full) in self.hub.repositories
    if not exists:
      self.hub.add('model', full, {}, private=visibility == 'private')
    self._send_json({'url': f'{self.hub.url}/{full}'}, 409 if exists else 200)

  def _preupload(self, _, body):
    mode = {True: 'lfs', False: 'regular'}
    files = [
      {'path': path, 'uploadMode': mode[path.endswith('.safetensors')], 'shouldIgnore': False}
      for path in (file['path'] for file in json.loads(body)['files'])
    ]
    self._send_json({'files': files})

  def _push(self, name, body):
    repository = self.hub.repositories['model', name]
    files = dict(repository.commits[repository.branches['main']])
    for line in map(json.loads, body.splitlines()):
      key, value = line['key'], line['value']
      if key == 'header':
        self.hub.commits.append((name, value['summary']))
      elif key == 'file':
        files[value['path']] = base64.b64decode(value['content'])
      elif key == 'lfsFile':
        files[value['path']] = self.hub.objects[value['oid']]
      else:
        del files[value['path']]
    sha = repository.commit(files)
    self._send_json({'commitUrl': f'{self.hub.url}/{name}/commit/{sha}', 'commitOid': sha})

  def _user(self):
    return self.hub.users.get(self.headers.get('Authorization', '').removeprefix('Bearer '))

  def _owns(self, name):
    user = self._user()
    return user and name.partition('/')[0] in [one['name'] for one in (user, *user['orgs'])]

  def _may_write(self, name):
    """Return True if the token may write to a repository; otherwise refuse the request."""
    if not self._user():
      return self._refuse(401, '')
    role = self._owns(name) and self._user()['auth']['accessToken']['role']
    return role == 'write' or self._refuse(403, '')

  def _send_json(self, content, status=200):
    self._send(json.dumps(content).encode(), {'Content-Type': 'application/json'}, status=status)

  def _answer(self):
    path = self.path.partition('?')[0]
    if _API.fullmatch(path) or _FILE.fullmatch(path):  # the library asks other things, too
      self.hub.requests.append((self.command, path, self.headers.get('Range')))
    if path == '/api/whoami-v2':
      self._send_json(self._user()) if self._user() else self._refuse(401, '')
    elif match := _WRITE.fullmatch(path):
      if self._may_write(match[1]):
        self._send_json({})
    elif match := _API.fullmatch(path):
      kind, name, what, revision = match.groups()
      found = self._commit(kind, name, revision or 'main')
      if found:
        repository, sha = found
        content = _tree(repository.commits[sha]) if what == 'tree' else _info(name, repository, sha)
        self._send_json(content)
    elif match := _FILE.fullmatch(path):
      kind, name, revision, file = match.groups()
      if found := self._commit(kind or 'models', name, revision):
        self._send_file(*found, urllib.parse.unquote(file))
    else:
      self._refuse(404, '')

  def _commit(self, kind, name, revision):
    """(repository, commit), or None once it has been refused."""
    repository = self.hub.repositories.get((kind.removesuffix('s'), name))
    if not repository or (repository.private and not self._owns(name)):
      return self._refuse(401, 'RepoNotFound')
    revision = urllib.parse.unquote(revision)
    sha = repository.branches.get(revision, revision)
    if sha not in repository.commits:
      return self._refuse(404, 'RevisionNotFound')
    return repository, sha

  def _send_file(self, repository, sha, file):
    content = repository.commits[sha].get(file)
    if content is None:
      self._refuse(404, 'EntryNotFound')
    elif repository.needs_token and file != 'README.md':
      self._refuse(403 if self.headers.get('Authorization') else 401, 'GatedRepo')
    else:
      headers = {'ETag': f'"{_oid(content)}"', 'X-Repo-Commit': sha}
      self._send(content, headers, self.hub.cuts.pop(file, None) if self.command == 'GET' else None)

  def _send(self, content, headers, cut=None, status=200):
    start = int(re.match(r'bytes=(\d+)-', self.headers.get('Range', 'bytes=0-'))[1])
    self.send_response(206 if start else status)
    if start:
      headers = headers | {'Content-Range': f'bytes {start}-{len(content) - 1}/{len(content)}'}
    for name, value in (headers | {'Content-Length': str(len(content) - start)}).items():
      self.send_header(name, value)
    self.end_headers()
    if self.command != 'HEAD':
      self.wfile.write(content[start:cut])
    if cut:
      self.close_connection = True

  def _refuse(self, status, code):
    self.send_response(status)
    for name in ('X-Error-Code', 'X-Error-Message'):
      self.send_header(name, code)
    self.send_header('Content-Length', '0')
    self.end_headers()


def _oid(content):
  return hashlib.sha1(content).hexdigest()


def _info(name, repository, sha):
  return {
    'id': name,
    'sha': sha,
    'private': repository.private,
    'siblings': [{'rfilename': path} for path in repository.commits[sha]],
  }


def _tree(files):
  return [
    {'type': 'file', 'path': path, 'size': len(content), 'oid': _oid(content)}
    for path, content in files.items()
  ]
