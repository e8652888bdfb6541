"""What a user gets wrong: each ends with status 2 and one line that says what to do.

No test here asserts a time, but nothing here compiles or trains: what is wrong is found first.
"""

import json
import re
import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers import forked, tiny
from tests.helpers.paths import CHECKPOINTS, REPOSITORY, TINY_CONFIG

SMOKE = '--config=smoke'
GOOD = [{'question': f'{n}+0', 'answer': f'{n}\n#### {n}'} for n in range(tiny.POOL)]


def text_of(*rows):
  return ''.join(row if isinstance(row, str) else json.dumps(row) + '\n' for row in rows)


# ---- Command line: arguments, and the line they lead to ----

COMMAND_LINES = {
  'config_name': (['train', '--config=smok'], r'--config=smok: there is no config of that name'),
  'fullwidth_equals': (
    ['train', '--config＝smoke'],
    r"--config＝smoke: '＝' \(FULLWIDTH EQUALS SIGN\) .* type it anew, as --name=value\.",
  ),
  'dash': (['train', '—config=smoke'], r"'—' \(EM DASH\) .* type it anew, as --name=value\."),
  'no_dashes': (['train', 'config=smoke'], r"'config=smoke' is not a flag; flags are written as"),
  'no_workdir': (['train', SMOKE], r'--config and --workdir are both needed, e\.g\. --config=smo'),
  'twice': (
    ['train', SMOKE, '--config.seed=1', '--workdir=w', '--config.seed', '2'],
    r'--config\.seed is given twice, --config\.seed=1 and --config\.seed; leave one of them out\.',
  ),
  'twice_no': (
    ['train', SMOKE, '--workdir=w', '--config.export.last', '--noconfig.export.last'],
    r'--config\.export\.last is given twice',
  ),
  'no_value': (['train', SMOKE, '--workdir'], r'Missing value for flag --workdir; --help lists'),
  'flag': (['train', SMOKE, '--wokdir=w'], r'--wokdir is no flag of .*; did you mean --workdir\?'),
  'flag_type': (
    ['evaluate', SMOKE, '--step=last'],
    r'--step=last must be an integer: Which of its checkpoints; the newest by default\.',
  ),
  'flag_range': (['evaluate', SMOKE, '--samples=0'], r'--samples=0 must be a positive integer: '),
  'flag_seed': (
    ['generate', SMOKE, f'--seed={2**63}'],
    r'--seed=9223372036854775808 must be an integer in the range \[0, 9223372036854775807\]: ',
  ),
  'flag_choice': (
    ['sweep', SMOKE, '--launcher=slurm'],
    r'--launcher=slurm must be one of local, commands: Runs the trials here',
  ),
  'flag_path': (
    ['train', SMOKE, '--workdir=~nobody_here/run'],
    r'--workdir=~nobody_here/run must be a path, in which ~ stands for a home folder that there is',
  ),
  'no_policy': (['generate', '--prompt=1+1'], r'one of --checkpoint and --model is needed: a run'),
  'two_policies': (
    ['generate', '--checkpoint=a', '--model=b', '--prompt=1+1'],
    r'--checkpoint=a and --model=b both name a policy; leave one of them out\.',
  ),
  **{
    f'{command[0]}_model_as_run': (
      [*command, f'--checkpoint={CHECKPOINTS}/qwen2_tied'],
      r"--checkpoint=\S+/qwen2_tied must be a run's workdir, and it holds a Hugging Face model",
    )
    for command in (['generate', '--prompt=1'], ['evaluate'], ['export', '--out=nowhere'])
  },
  'check_model': (
    ['check', SMOKE, '--workdir=w', '--config.model.path=nowhere'],
    r'config\.model\.path=nowhere is not a folder; it must be a Hugging Face checkpoint',
  ),
  'check_tokenizer': (
    ['check', SMOKE, '--workdir=w', '--config.tokenizer.path=nowhere'],
    r'nowhere must be a tokenizer\.json, .* and there is none; check config\.tokenizer\.path',
  ),
  'check_length': (
    [
      'check',
      SMOKE,
      '--workdir=w',
      f'--config.model.path={CHECKPOINTS}/qwen2_tied',
      '--config.rollout.max_response=999',
    ],
    r' tokens exceed max_position_embeddings=128 of ',
  ),
  'hosts': (['train', SMOKE, '--process_id=1'], r'--coordinator_address, .* belong together: give'),
  'workdir_remote': (
    ['train', SMOKE, '--workdir=gs://bucket/run'],
    r'--workdir=gs://bucket/run must be a local folder',
  ),
  'data': (['data'], r"'': the first word must be one of: show, prefilter; --help says more\."),
  'data_word': (['data', 'shwo', 'x.csv'], r"'shwo': the first word must be one of: show"),
  'data_spec': (['data', 'show'], r'must be followed by one data spec or more; --help says more'),
  'data_file': (['data', 'show', 'nowhere.csv'], r'nowhere\.csv: there is no such file; a data'),
  'topology': (
    ['capacity', '--config=base', '--topology=v5e'],
    r'--topology=v5e must be a generation and a slice, such as v5e:4x4',
  ),
  'topology_and_device': (
    ['capacity', '--config=base', '--topology=v5e:4x4', '--device=l4'],
    r'--topology=v5e:4x4 and --device=l4 are both given; name a slice or a GPU',
  ),
  'lengths': (
    ['capacity', '--config=base', '--topology=v5e:4x4', '--lengths=lognormal:1k'],
    r'--lengths=lognormal:1k must be lognormal:MEDIAN or lognormal:MEDIAN,LIMIT in tokens, such as',
  ),
  'no_held_out_questions': (
    ['train', SMOKE, '--workdir=w', '--config.data.evaluation=()', '--config.alignment.every=2'],
    r'alignment\.every=2 needs config\.data\.validation or config\.data\.evaluation: their quest',
  ),
  'study': (
    ['study', '--study=smok', '--workdir=w'],
    r"--study=smok: there is no study of that name; did you mean 'smoke'\? It must be a path that ",
  ),
  'study_config': (
    ['study', SMOKE, '--study=smoke', '--workdir=w'],
    r'--config is no flag of this command; there are: --launcher, --parallel, --study, --workdir',
  ),
  'sweep': (
    ['sweep', SMOKE, '--workdir=w', '--sweep=ratoi'],
    r"--sweep=ratoi: there is no sweep of that name; did you mean 'ratio'\?",
  ),
  'sweep_unwritable': (
    ['sweep', SMOKE, '--workdir=/dev/null/w', '--sweep=ratio'],
    r'--workdir=/dev/null/w cannot be written into',
  ),
  'verify': (['verify', '--respons=5'], r'unrecognized arguments: --respons=5; --help lists all'),
  'verify_both': (
    ['verify', '--file=cases.jsonl', '--answer=5'],
    r'--file and --answer are both given; judge a file, or one response',
  ),
  'verify_kind': (
    ['verify', '--response=5', '--answer=5', '--kind=maths'],
    r"kind='maths' must be one of math, choice, text",
  ),
}

# ---- Config: overrides of smoke, or the text of a file ----

OVERRIDES = {
  'before_the_config': (None, r'--config\.seed=1 changes a setting of --config, which must come '),
  'key': ('replay.ratoi=0.25', r"config\.replay has no 'ratoi'; did you mean 'ratio'\?"),
  'key_of_a_truth_value': ('noreplay.foo', r"config has no 'noreplay'"),
  'value_of_a_value': ('seed.x=1', r"config\.seed is one value and has no 'x'\."),
  'value_of_a_section': ('replay=0.5', r'config\.replay is a section; an override sets one value,'),
  'float': (
    'replay.ratio=half',
    r"config\.replay\.ratio='half' must be of type float, not str: share of .* it is 0\.5\.",
  ),
  'bool': ('export.best=maybe', r"config\.export\.best='maybe' must be of type bool"),
  'former_bool': (
    'objective.shaping=False',
    r"shaping='False' must be one of fraction, none, power, log, ratio_plus_log: what a replayed",
  ),
  'tuple': ('data.evaluation=(a, b', r"config\.data\.evaluation='\(a, b' must be of type tuple"),
  'seed': (f'seed={2**63}', r'config\.seed=9223372036854775808 must lie in \[0, 2\^63\): two runs'),
  'experience': (
    'experience.path=nowhere',
    r'path=nowhere is neither a \.jsonl nor a \.parquet fi',
  ),
  'reward': ('grading.rewards=nowhere:f', r"config\.grading\.rewards: 'nowhere:f' cannot be used"),
}

FILES = {
  'syntax': ('def get_config(:\n', r':1: SyntaxError: .*; a config is a Python file whose get_co'),
  'raises': ('\nx = nope\n', r":2: NameError: name 'nope' is not defined; a config is"),
  'exits': ('import sys\nsys.exit(0)\n', r':2: SystemExit: 0; a config is'),
  'no_get_config': ('x = 1\n', r': it has no get_config\(\); a config is'),
  'returns_none': ('def get_config(): pass\n', r': get_config\(\) returns NoneType; a config is'),
  'section': (
    'from exgrpo_jax.configs import smoke\n'
    'def get_config():\n'
    '  config = smoke.get_config()\n'
    '  with config.ignore_type():\n'
    '    config.optimizer = 1\n'
    '  return config\n',
    r'config\.optimizer=1 must be a section of its own, such as config\.optimizer\.minibatches',
  ),
}

# ---- Data: name and content of a file, or a data spec with {good}, and further flags ----

DATA = {
  'missing': (None, '{folder}/nowhere.jsonl', r'nowhere\.jsonl: there is no such file; a data sp'),
  'suffix': (('x.txt', '[]'), '{file}', r"the data spec '.*x\.txt' must be an embedded task"),
  'json': (
    ('x.jsonl', text_of(*GOOD, '{"question": ')),
    '{file}',
    r'x\.jsonl:13: not valid JSON \(.*\); every line must hold one object, in UTF-8\.',
  ),
  'field': (
    ('x.jsonl', text_of({'question': '1', 'key': '2'})),
    '{file}',
    r"no column is known to be the answer \(has: 'question', 'key'\); set config\.data\.answer_fi",
  ),
  'ambiguous': (
    ('x.jsonl', text_of({'question': '1', 'prompt': '1', 'answer': '2'})),
    '{file}',
    r"'question', 'prompt' could each be the question \(.*\); set config\.data\.question_field to",
  ),
  'unverifiable': (
    ('x.jsonl', text_of(*GOOD, {'question': '1', 'answer': 'proof'})),
    '{file}',
    r"1 rows have no answer that can be checked \(the answer is 'proof': 1\), the first at x\.json",
  ),
  'empty': (('x.jsonl', ''), '{file}', r'x\.jsonl: the file holds no question; at least one is'),
  'columns': (
    ('x.parquet', None),
    '{file}',
    r"no column is known to be the answer \(has: 'prompt'",
  ),
  'damaged': (('x.parquet', 'PAR1'), '{file}', r'not a complete parquet file .* write it again'),
  'tfds': (None, 'nosuch:train', r"'nosuch' is neither an embedded task \(arithmetic, chains\)"),
  'slice': (None, '{good}[a:b]', r'the slice \[a:b\] must follow TFDS syntax, such as \[:640\]'),
  'slice_too_long': (None, '{good}[:100]', r'\[:100\] must .* stay within the 12 rows of the spl'),
  'slice_empty': (None, '{good}[5:5]', r'\[5:5\] selects none of the 12 rows'),
}
EXPERIENCE = {  # its content
  'columns': (
    'x.jsonl',
    '{"question": "2+0"}',
    r":1: no 'response' or 'target' or 'tokens' \(has: ",
  ),
  'row': (
    'x.jsonl',
    '{"question": "2+0", "response": 2}',
    r'x\.jsonl:1: response is 2; it must be',
  ),
  'unmatched': (
    'x.jsonl',
    '{"question": "what?", "response": "2"}',
    r'none of its 1 traces asks a question of ',
  ),
  'wrong': (
    'x.jsonl',
    '{"question": "0+0", "response": "7"}',
    r'none of its 1 responses to questions of \S+ is right \(1 wrong\), and only successes are',
  ),
  'damaged': ('x.parquet', 'PAR1', r'x\.parquet: not a complete parquet file'),
}
SETTINGS_AND_DATA = {
  'prompt': ('rollout.max_prompt=2', r'the prompt of row 0 has \d tokens.*; raise the limit, or s'),
  'few_questions': ('rollout.questions=14', r'questions=14 must be at most the 12 questions of '),
  'few_held_out': (
    'alignment.every=1',
    r'alignment\.questions=32 must be at most the 12 questions',
  ),
  'evaluation': ("data.evaluation=('nowhere.jsonl',)", r'nowhere\.jsonl: there is no such file'),
  'solution': ('rollout.max_response=1', r'the solution of row 0 has \d+ tokens, over .*; raise'),
  'vocabulary': ('tokenizer.vocab_size=9', r'vocab_size=9 must be at least \d+: 4 reserved pieces'),
  'training_mesh': (
    'mesh.training.fsdp=3',
    r'config\.mesh\.training data=1, fsdp=3, tensor=1 does not fit 1 device',
  ),
  'decoding_mesh': (
    'mesh.decoding.tensor=3',
    r'config\.mesh\.decoding data=-1, tensor=3 does not fit 1 device',
  ),
  'old_mesh': ('mesh.fsdp=1', r"config\.mesh has no 'fsdp'; it has: decoding, training"),
  'system': ('prompt.system=Be brief.', r"prompt\.system='Be brief\.' needs .* leaves system mess"),
  'template': ('prompt.template=chat', r"template='chat' needs a chat template, .* Use 'plain' or"),
}

# ---- Hugging Face folders: what is done to one ----


def without(name):
  return lambda folder: (folder / name).unlink()


def cut(name):
  return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:100])


def with_field(**fields):
  def change(folder):
    path = folder / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))

  return change


def in_shards_without_the_first(folder):
  (folder / 'model.safetensors').unlink()
  index = {'weight_map': {'model.norm.weight': 'model-00001-of-00002.safetensors'}}
  (folder / 'model.safetensors.index.json').write_text(json.dumps(index))


HUGGING_FACE = {
  'no_folder': (None, shutil.rmtree, r'model\.path=\S+ is not a folder; it must be a Hugging Face'),
  'no_config': ('qwen2_tied', without('config.json'), r'holds no config\.json; it must be a Hugg'),
  'damaged_config': ('qwen2_tied', cut('config.json'), r'not valid JSON .*; download the checkpoi'),
  'architecture': (
    'qwen2_tied',
    with_field(architectures=['GPT2LMHeadModel']),
    r"architecture 'GPT2LMHeadModel' is not supported; supported are Qwen2ForCausalLM",
  ),
  'no_number': (
    'qwen2_tied',
    with_field(hidden_size='wide'),
    r"hidden_size='wide' must be a number",
  ),
  'no_tokenizer': ('qwen2_tied', without('tokenizer.json'), r'must be a tokenizer\.json, a Senten'),
  'no_weights': ('qwen2_tied', without('model.safetensors'), r'holds neither model\.safetensors n'),
  'damaged_weights': ('qwen2_tied', cut('model.safetensors'), r'not a complete safe.*download it'),
  'shape': (
    'qwen2_tied',
    with_field(intermediate_size=96),
    r'tensor \S+ has shape \[48, 32\]; config\.json requires \[96, 32\]\.',
  ),
  'no_shard': (
    'qwen2_tied',
    in_shards_without_the_first,
    r'lists model-00001-of-00002\.safetensors as the file of .*download the checkpoint again',
  ),
}


# ---- All of them ----


@pytest.fixture(scope='module')
def place(tmp_path_factory):
  folder = tmp_path_factory.mktemp('refusals')
  (folder / 'good.jsonl').write_text(text_of(*GOOD))
  return folder


def on_data(place, spec, *flags, **settings):
  """A training on a data spec; settings are in a file, for each override takes time to parse."""
  settings = {
    'data.train': str(spec),
    'warm_start.data': str(spec),
    'data.evaluation': (str(place / 'good.jsonl'),),
    'data.cache_dir': str(place / 'cache'),
    **settings,
  }
  path = place / f'on_data_{len(list(place.glob("on_data_*.py")))}.py'
  path.write_text(
    'from exgrpo_jax import config\nfrom tests.helpers import tiny\n\n'
    f'def get_config():\n  return config.overridden(tiny.get_config(), {settings!r})\n'
  )
  return ['train', f'--config={path}', f'--workdir={place}/run', *flags]


def from_checkpoint(place, name, original, change):
  folder = place / name
  if original:
    shutil.copytree(CHECKPOINTS / original, folder)
    for file in ('tokenizer.json', 'tokenizer_config.json'):
      shutil.copy(CHECKPOINTS / 'qwen2_tied' / file, folder)
  else:
    folder.mkdir()
  change(folder)
  settings = {
    'model.path': str(folder),
    'prompt.template': 'chat',
    'rollout.max_prompt': 64,
    'warm_start.num_updates': 0,
  }
  return on_data(place, place / 'good.jsonl', **settings)


def file_of(place, name, file):
  """Writes a case's file, if it has one; None as its content is a table with one column."""
  if file is None:
    return ''
  path = place / f'data_{name}' / file[0]
  path.parent.mkdir()
  if file[1] is None:
    pq.write_table(pa.table({'prompt': ['1+1']}), path)
  else:
    path.write_text(file[1])
  return path


def cases(place):
  """Name -> (command, the line it leads to)."""
  found = {f'command_{name}': case for name, case in COMMAND_LINES.items()}
  workdir = f'--workdir={place}/untouched'
  for name, (override, line) in OVERRIDES.items():
    flags = [f'--config.{override}'] if override else []
    found[f'config_{name}'] = (
      ['train', SMOKE, workdir, *flags] if flags else ['train', '--config.seed=1', SMOKE, workdir],
      line,
    )
  for name, (text, line) in FILES.items():
    path = place / f'{name}.py'
    path.write_text(text)
    found[f'config_{name}'] = (['train', f'--config={path}', workdir], line)
  for name, (file, spec, line) in DATA.items():
    path = file_of(place, name, file)
    spec = spec.format(file=path, folder=place, good=place / 'good.jsonl')
    found[f'data_{name}'] = (on_data(place, spec), line)
  for name, (file, text, line) in EXPERIENCE.items():
    path = file_of(place, f'experience_{name}', (file, text))
    flag = f'--config.experience.path={path}'
    found[f'data_experience_{name}'] = (on_data(place, place / 'good.jsonl', flag), line)
  for name, (setting, line) in SETTINGS_AND_DATA.items():
    found[f'data_{name}'] = (
      on_data(place, place / 'good.jsonl', f'--config.{setting}'),
      line,
    )
  for name, (original, change, line) in HUGGING_FACE.items():
    found[f'model_{name}'] = (from_checkpoint(place, name, original, change), line)
  return found


@pytest.fixture(scope='module')
def outcomes(place):
  """Name -> (its outcome, the line it should have)."""
  all_cases = cases(place)
  return {
    name: (outcome, line)
    for (name, (_, line)), outcome in zip(
      all_cases.items(), forked.run(command for command, _ in all_cases.values())
    )
  }


def assert_refused(status, err, line):
  assert status == 2, err
  assert err.startswith('error: ') and err.count('\n') == 1, err
  assert re.search(line, err), (line, err)


def test_each_ends_with_status_2_and_one_line_that_says_what_to_do(outcomes):
  assert len(outcomes) > 40
  problems = []
  for name, (outcome, line) in outcomes.items():
    try:
      assert_refused(outcome.status, outcome.err, line)
    except AssertionError as error:
      problems.append(f'{name}: {error}')
  assert problems == []


def test_command_lines_and_configs_are_refused_before_any_device_or_folder_is_touched(
  outcomes, place
):
  early = [outcome for name, (outcome, _) in outcomes.items() if name[:6] in ('comman', 'config')]
  assert not any(outcome.used_device for outcome in early)
  assert not (place / 'untouched').exists()


def test_no_refusal_claims_the_workdir_or_writes_results(outcomes, place):
  written = {path.name for path in (place / 'run').iterdir()}
  assert written <= {'console.log', 'tokenizer.model', 'run.lock'}, outcomes.keys()


# ---- Runs ----


@pytest.mark.parametrize('command', ['evaluate', 'export'])
def test_what_is_no_run_or_has_no_such_step_is_refused(command, recorded, tmp_path):
  flags = {'evaluate': [f'--config={TINY_CONFIG}'], 'export': [f'--out={tmp_path}/policy']}[command]
  if command == 'evaluate':
    flags += [f'--config.{name}' for name in overrides_of(recorded)]
  (tmp_path / 'config.json').write_text('{"seed": ')
  lines = {
    f'--checkpoint={tmp_path}/nowhere': r"is no run's workdir: it holds no config\.json; name tr",
    f'--checkpoint={tmp_path}': r'config\.json cannot be read as the config of a run .*; bring b',
  }
  commands = [[command, flag, *flags] for flag in lines]
  (tmp_path / 'begun').mkdir()
  shutil.copy(recorded.workdir / 'config.json', tmp_path / 'begun')
  lines['begun'] = r'/begun: that run has no checkpoint, .*; wait for the first one, or na'
  commands.append([command, f'--checkpoint={tmp_path}/begun', *flags])
  lines['step'] = r'checkpoints has no step 99; it has: 4, 8, .*32\.'
  commands.append([command, f'--checkpoint={recorded.workdir}', '--step=99', *flags])
  if command == 'evaluate':
    lines['model'] = r'belongs to another config: config\.model\.width was 32, is 64\. Choose'
    commands.append(
      [command, f'--checkpoint={recorded.workdir}', *flags, '--config.model.width=64']
    )
  for outcome, line in zip(forked.run(commands), lines.values(), strict=True):
    assert_refused(outcome.status, outcome.err, line)


def overrides_of(recorded):
  data = recorded.values.data
  return [
    f'data.train={data.train}',
    f'data.evaluation={data.evaluation!r}',
    f'data.cache_dir={data.cache_dir}',
  ]


# ---- In a process of its own ----


def test_a_process_ends_as_its_fork_does():
  process = subprocess.run(
    [sys.executable, '-m', 'exgrpo_jax', 'check', SMOKE, '--workdir=w', '--config.seed=x'],
    cwd=REPOSITORY,
    text=True,
    capture_output=True,
  )
  assert_refused(process.returncode, process.stderr, r"config\.seed='x' must be of type int")
  assert process.stdout == ''


def test_a_command_line_that_nothing_is_wrong_with_passes_the_check(place):
  (outcome,) = forked.run([['check', SMOKE, f'--workdir={place}/new']])
  assert (outcome.status, outcome.err) == (0, '')
  assert outcome.out.startswith('nothing is wrong with the flags and the config; ')
  assert not (place / 'new').exists() and not outcome.used_device
