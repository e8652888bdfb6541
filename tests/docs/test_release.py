"""What stands in several files agrees: versions, and the packages of the wheel."""

import configparser
import re

import yaml

import exgrpo_jax
from tests.docs import documents
from tests.helpers.paths import REPOSITORY


def read_yaml(name):
  return yaml.safe_load((REPOSITORY / name).read_text())


def setup():
  parser = configparser.ConfigParser(interpolation=None)
  parser.read(REPOSITORY / 'setup.cfg')
  return parser


def jobs(workflow='tests'):
  return read_yaml(f'.github/workflows/{workflow}.yml')['jobs']


def test_the_citation_and_the_changelog_have_the_version():
  assert read_yaml('CITATION.cff')['version'] == exgrpo_jax.__version__
  assert f'## [{exgrpo_jax.__version__}]' in documents.CHANGELOG.read_text()


def test_the_package_takes_its_version_from_the_source():
  assert setup()['metadata']['version'] == 'attr: exgrpo_jax.__version__'


def test_the_wheel_has_every_package():
  folders = {path.parent for path in (REPOSITORY / 'exgrpo_jax').rglob('*.py')}
  names = {'.'.join(folder.relative_to(REPOSITORY).parts) for folder in folders}
  names |= {f'exgrpo_jax.configs{folder}' for folder in ('', '.suites', '.sweeps')}
  assert set(setup()['options']['packages'].split()) == names


def test_every_python_of_the_classifiers_is_tested():
  classifiers = setup()['metadata']['classifiers']
  pythons = re.findall(r'Python :: (3\.\d+)', classifiers)
  assert jobs()['tests']['strategy']['matrix']['python'] == pythons
  assert jobs('release')['test']['strategy']['matrix']['python'] == pythons
  assert setup()['options']['python_requires'] == f'>={pythons[0]}'


def test_the_images_are_built_of_what_the_wheel_needs_with_extras_that_exist():
  extras = setup()['options.extras_require']
  for path in (REPOSITORY / 'docker').glob('*.Dockerfile'):
    text = path.read_text()
    copied = {
      name for line in re.findall(r'^COPY (.*) \S+$', text, re.MULTILINE) for name in line.split()
    }
    assert copied == {
      'setup.cfg',
      'pyproject.toml',
      'README.md',
      'LICENSE',
      'configs',
      'exgrpo_jax',
    }
    assert all((REPOSITORY / name).exists() for name in copied)
    for named in re.findall(r'EXTRAS=([\w,]+)', text):
      assert set(named.split(',')) <= set(extras), named


def test_the_oldest_jax_allowed_and_the_newest_are_tested():
  oldest = re.search(r'^jax>=([\d.]+)', setup()['options']['install_requires'], re.MULTILINE)[1]
  assert jobs()['tests']['strategy']['matrix']['jax'] == [f'jax=={oldest}', 'jax']


def test_pre_commit_hooks_have_an_id_and_a_revision():
  for repository in read_yaml('.pre-commit-config.yaml')['repos']:
    assert re.fullmatch(r'v[\d.]+', repository['rev']), repository['repo']
    assert all(hook['id'] for hook in repository['hooks'])
