"""Hugging Face Hub repositories: resolving names to commits, fetching and publishing files.

`owner/name` is the default branch of a model or dataset; `owner/name@revision` is one of its
branches, tags or commits. huggingface_hub downloads files to its shared cache (HF_HOME), with the
token from `hf auth login`.

Branches move, so a process resolves each name to a commit only once, and all hosts use the same
commit. A resumed run reads the commits from workdir/hub.json (`record`, `recall`).
"""

import contextlib
import fnmatch
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import huggingface_hub
from huggingface_hub import constants, errors, utils

from exgrpo_jax import __version__
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import activity, hosts
from exgrpo_jax.runtime.workdir import write_json

FILE = 'hub.json'  # in a workdir: 'models/owner/name@main' -> commit

_NAME = re.compile(r'(?P<name>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>[^\s@:]+))?', re.ASCII)
# Files fetched to look up a commit. Every repository has .gitattributes, README.md lists a data
# set's splits, and a gated model withholds config.json but not README.md.
DESCRIPTION = ('.gitattributes', 'README.md', 'config.json')

_recorded: dict[str, str] = {}  # `Repository.key` -> commit, from hub.json
_commits: dict[str, str] = {}  # `Repository.key` -> commit, resolved by this process


class NoRevisionError(InputError):
  """An error for a branch, tag or commit that a repository does not have."""


class Repository(NamedTuple):
  """A model or dataset on the Hub."""

  kind: str  # 'model' or 'dataset'
  name: str  # owner/name
  revision: str  # a branch, tag or commit; '' is the default branch

  def __str__(self) -> str:
    return f'{self.name}@{self.revision}' if self.revision else self.name

  @property
  def key(self) -> str:
    """Return the repository's key in hub.json."""
    return f'{self.kind}s/{self.name}@{self.revision or constants.DEFAULT_REVISION}'

  @property
  def page(self) -> str:
    """Return the repository's URL."""
    folder = '' if self.kind == 'model' else f'{self.kind}s/'
    return f'{constants.ENDPOINT}/{folder}{self.name}'


def parse(kind: str, text: str) -> Repository | None:
  """Parse owner/name or owner/name@revision. Returns None for any other text."""
  match = _NAME.fullmatch(text)
  return Repository(kind, match['name'], match['revision'] or '') if match else None


def recall(workdir: str) -> None:
  """Start using the commits recorded in `workdir`, if it contains a run."""
  _commits.clear()
  _recorded.clear()
  path = os.path.join(workdir, FILE)
  # Without config.json, hub.json is left over from a rejected start.
  if not os.path.exists(path) or not os.path.exists(os.path.join(workdir, 'config.json')):
    return
  try:
    with open(path) as file:
      _recorded.update(json.load(file))
  except (OSError, ValueError, TypeError) as error:
    raise InputError(
      f"{path}: the run's Hub commits cannot be read ({error}). Restore this file from a backup."
    ) from error


@contextlib.contextmanager
def as_in(workdir: str) -> Iterator[None]:
  """Resolve names to another run's commits during the block."""
  old_contents = dict(_recorded), dict(_commits)
  recall(workdir)
  try:
    yield
  finally:
    for registry, content in zip((_recorded, _commits), old_contents):
      registry.clear()
      registry.update(content)


def record(workdir: str) -> None:
  """Write the resolved commits to hub.json for `recall`; only the first host writes."""
  if commits := _recorded | _commits:
    write_json(os.path.join(workdir, FILE), commits)


def pinned(repository: Repository) -> Repository:
  """Pin the repository to its commit, and print the commit the first time.

  All hosts must call this. Raises InputError if the repository or the revision does not exist, or
  if the Hub cannot be reached and the cache is incomplete.
  """
  if repository.key not in _commits:
    commit, origin = _recorded.get(repository.key), f', from {FILE}'
    if not commit:
      fetched_commit = hosts.is_first() and os.path.basename(fetch(repository, DESCRIPTION))
      commit, origin = hosts.broadcast_from_first(fetched_commit), ''
    _commits[repository.key] = commit
    print(f'{repository.kind} {repository}: commit {commit}{origin}', flush=True)
  return as_known(repository)


def as_known(repository: Repository) -> Repository:
  """Pin the repository if this process has already resolved its commit."""
  return repository._replace(revision=_commits.get(repository.key, repository.revision))


def fetch(repository: Repository, patterns: Sequence[str]) -> str:
  """Download the repository's files that match any of the patterns; return their folder.

  Cached files are not downloaded again, and an interrupted download resumes.
  """
  if not sys.stderr.isatty():
    utils.disable_progress_bars()  # in a log, each update would be a line
  with _refusals(repository), activity.doing(f'fetching {repository.name}'):
    return huggingface_hub.snapshot_download(
      repository.name,
      repo_type=repository.kind,
      revision=repository.revision or None,
      allow_patterns=list(patterns),
    )


def listing(repository: Repository) -> list[str]:
  """List all file paths in a pinned repository. Call `fetch` on some of its files first."""
  with _refusals(repository):
    files = huggingface_hub.get_cached_repo_tree(
      repository.name, repo_type=repository.kind, revision=repository.revision
    )
  return sorted(file.path for file in files)


@contextlib.contextmanager
def _refusals(repository: Repository) -> Iterator[None]:
  kind, name = repository.kind, repository.name
  try:
    yield
  except errors.HFValidationError as error:
    raise InputError(
      f'there is no folder {name}, and this is not a valid Hub name ({_reason(error)}). '
      'Correct the name.'
    ) from error
  except errors.RevisionNotFoundError as error:
    raise NoRevisionError(
      f"the {kind} {name} has no revision '{repository.revision}'. Choose one of the branches, "
      f'tags or commits listed on {repository.page}.'
    ) from error
  except errors.GatedRepoError as error:
    login = "Then run 'hf auth login', or set HF_TOKEN."
    if huggingface_hub.get_token():
      login = 'Your token does not have access yet.'
    raise InputError(
      f'the {kind} {name} is gated. Accept its license on {repository.page}. {login}'
    ) from error
  except errors.RepositoryNotFoundError as error:
    raise InputError(
      f'there is no folder {name}, and {constants.ENDPOINT} has no public {kind} with this name. '
      f"If the {kind} is private, run 'hf auth login' or set HF_TOKEN."
    ) from error
  except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
    why = f'{constants.ENDPOINT} cannot be reached ({_reason(error.__cause__ or error)}). Use'
    if constants.HF_HUB_OFFLINE:
      why = 'HF_HUB_OFFLINE is set. Unset HF_HUB_OFFLINE, use'
    local = 'a local folder' if repository.kind == 'model' else 'local .jsonl or .parquet files'
    raise InputError(
      f'the {kind} {name} is not fully cached in {constants.HF_HUB_CACHE}, and {why} {local} '
      'instead, or set HF_ENDPOINT to a mirror of the Hub.',
      status=2 if constants.HF_HUB_OFFLINE else 1,
    ) from error
  except Exception as error:  # from the network, the disk, or the library's own checks
    raise InputError(
      f'the {kind} {name} cannot be downloaded to {constants.HF_HUB_CACHE} ({_reason(error)}). Run '
      'the same command again to continue, or set HF_HOME to use another folder.',
      status=1,
    ) from error


# ---- Publishing ----

_LOGIN = "Run 'hf auth login', or set HF_TOKEN to a token with write permission."


def check_push(name: str, public: bool) -> None:
  """Check that `publish` may write to the model repository `name`, which need not exist yet.

  Changes nothing on the Hub. Raises InputError if the name is invalid, if the token is missing or
  may not write there, if an existing repository's visibility contradicts `public`, or if the Hub
  cannot be reached.
  """
  owner, slash, _ = name.partition('/')
  problem = '' if slash else 'the name has no owner. Write owner/name with your user name as owner.'
  try:
    utils.validate_repo_id(name)
  except errors.HFValidationError:
    problem = "this is not a valid name. Write owner/name with letters, digits, '-', '_' and '.', "
    problem += "without '--' or '..'."
  if problem:
    raise InputError(f'--push={name}: {problem}')
  with _push_refusals(name):
    api = huggingface_hub.HfApi()
    try:
      info = api.model_info(name)
    except errors.RepositoryNotFoundError:
      user = api.whoami()
      owners = [user['name'], *(group['name'] for group in user.get('orgs', ()))]
      if user.get('auth', {}).get('accessToken', {}).get('role') == 'read':
        problem = f'your token is read-only. {_LOGIN}'
      elif owner not in owners:
        problem = f'your token may not write to {owner}. Choose one of: {", ".join(owners)}.'
    else:
      api.auth_check(name, write=True)
      if info.private == public:
        state, change = ('private', 'Remove --public') if public else ('public', 'Add --public')
        problem = (
          f'this repository already exists and is {state}. {change}, or choose another name.'
        )
  if problem:
    raise InputError(f'--push={name}: {problem}')


def publish(
  files: Mapping[str, str | bytes], name: str, public: bool, patterns: Sequence[str]
) -> str:
  """Upload files to a model repository, in one commit; return the URL of its page.

  `files` maps names to local paths or contents. Creates the repository if it is missing. Other
  top-level files in the repository are deleted if they match any of the `patterns`; otherwise users
  could load the weights of an earlier upload. Raises InputError if the upload fails.
  """
  if not sys.stderr.isatty():
    utils.disable_progress_bars()
  with _push_refusals(name), activity.doing(f'uploading to {name}'):
    api = huggingface_hub.HfApi()
    api.create_repo(name, private=not public, exist_ok=True)
    stale = [
      file
      for file in api.list_repo_files(name)
      if file not in files and '/' not in file and any(fnmatch.fnmatch(file, p) for p in patterns)
    ]
    # Not upload_folder, which splits a long upload into several commits.
    operations = [
      *(huggingface_hub.CommitOperationAdd(file, source) for file, source in files.items()),
      *(huggingface_hub.CommitOperationDelete(file) for file in stale),
    ]
    api.create_commit(name, operations, commit_message=f'Upload with exgrpo_jax {__version__}')
  return Repository('model', name, '').page


@contextlib.contextmanager
def _push_refusals(name: str) -> Iterator[None]:
  try:
    if not huggingface_hub.get_token():
      raise InputError(f'--push={name}: no Hub token was found. {_LOGIN}')
    yield
  except InputError:
    raise
  except errors.OfflineModeIsEnabled as error:
    raise InputError(f'--push={name}: HF_HUB_OFFLINE is set. Unset it to publish.') from error
  except Exception as error:  # from the network, the disk, or the library's own checks
    reason, status = _reason(error.__cause__ or error), 1
    why = f'the request to {constants.ENDPOINT} failed ({reason}). Try again later.'
    code = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
    if code in (401, 403, 404):
      refusal = 'was not accepted' if code == 401 else 'may not write to this repository'
      why, status = f'your token {refusal}. {_LOGIN}', 2
    raise InputError(f'--push={name}: nothing was published, because {why}', status) from error


def _reason(error: BaseException) -> str:
  return f'{type(error).__name__}: {str(error).strip()}'.splitlines()[0]
