"""What a TensorBoard page gets: scalars in groups, charts, completions, settings."""

import struct

from tensorboardX.proto import event_pb2, layout_pb2, plugin_hparams_pb2

from exgrpo_jax.reporting import metrics
from tests.helpers import tiny


def events(workdir):
  """The events under workdir/tensorboard; a file repeats length, checksum, event, checksum."""
  for path in sorted((workdir / 'tensorboard').iterdir()):
    data = path.read_bytes()
    while data:
      (length,) = struct.unpack('<Q', data[:8])
      yield event_pb2.Event.FromString(data[12 : 12 + length])
      data = data[16 + length :]


def of_plugin(workdir, name):
  """(step, value) of the summaries that a plugin shows."""
  return [
    (event.step, value)
    for event in events(workdir)
    for value in event.summary.value
    if value.metadata.plugin_data.plugin_name == name
  ]


def scalars(workdir):
  return [
    (event.step, value.tag, value.simple_value)
    for event in events(workdir)
    for value in event.summary.value
    if not value.metadata.plugin_data.plugin_name
  ]


def test_a_resumed_run_drops_the_scalars_of_steps_that_it_repeats(tmp_path):
  with metrics.Writer(tmp_path, 3) as writer:
    for step in (3, 4):
      writer.write(step, {'reward': 0.5})
  assert scalars(tmp_path) == [(3, 'reward/mean', 0.5), (4, 'reward/mean', 0.5)]
  starts = [e.step for e in events(tmp_path) if e.session_log.status == event_pb2.SessionLog.START]
  assert starts == [3]


def test_every_tag_of_a_real_run_is_in_a_group_and_every_metric_has_one(recorded):
  written = {(step, tag) for step, tag, _ in scalars(recorded.workdir)}
  assert all('/' in tag for _, tag in written)
  assert written == {
    (record['step'], metrics.tag(name))
    for record in metrics.read(recorded.workdir)
    for name in record
    if name not in ('step', 'timestamp')
  }
  assert all('/' in tag for _, tag, _ in scalars(recorded.workdir / 'warm_start'))
  assert metrics.tag('eval/a b/pass@1_low') == 'eval_interval/a_b/pass_at_1_low'


def test_an_evaluation_and_its_interval_are_one_chart(recorded):
  ((_, value),) = of_plugin(recorded.workdir, 'custom_scalars')
  layout = layout_pb2.Layout.FromString(value.tensor.string_val[0])
  evaluation, training = layout.category
  ((series,),) = [chart.margin.series for chart in evaluation.chart]
  assert (series.value, series.lower, series.upper) == (
    'eval/data_evaluation/pass_at_1',
    'eval_interval/data_evaluation/pass_at_1_low',
    'eval_interval/data_evaluation/pass_at_1_high',
  )
  tags = {tag for _, tag, _ in scalars(recorded.workdir)}
  assert {series.value, series.lower, series.upper} <= tags
  assert 'Outcomes' in [chart.title for chart in training.chart]


def test_completions_of_every_step_can_be_read(recorded):
  texts = of_plugin(recorded.workdir, 'text')
  assert {step for step, _ in texts} == set(range(1, tiny.NUM_STEPS + 1))
  # tensorboardX itself adds the last part.
  assert {value.tag.removesuffix('/text_summary') for _, value in texts} == {
    f'completions/{kind}_{number}' for kind in ('fresh', 'replayed') for number in (1, 2)
  }
  assert all(b'**response**' in value.tensor.string_val[0] for _, value in texts)


def test_the_settings_are_shown_once(recorded):
  datas = [
    plugin_hparams_pb2.HParamsPluginData.FromString(value.metadata.plugin_data.content)
    for _, value in of_plugin(recorded.workdir, 'hparams')
  ]
  experiment, session = datas
  assert session.session_start_info.hparams['replay.ratio'].number_value == tiny.RATIO
  assert [metric.name.tag for metric in experiment.experiment.metric_infos] == [
    'eval/data_evaluation/pass_at_1',
    'reward/mean',
  ]
  assert session.session_start_info.hparams['objective.dual_clip'].string_value == 'inf'
  assert 'evaluation.every' not in session.session_start_info.hparams


def test_a_completion_is_code_whatever_is_in_it_and_is_cut_where_it_is_long():
  row = dict(row=3, answer='7', outcome='wrong', reward=0.0, truncated=True, replayed=False)
  row |= {'question': '<|user|>3+4\n```', 'response': 'x' * 4100}
  text = metrics.markdown(row)
  assert text.startswith('row: 3, answer: 7, outcome: wrong, reward: 0.0, truncated: True\n\n')
  assert '**question**\n\n    <|user|>3+4\n    ```\n\n' in text
  assert text.endswith(f'    {"x" * 4000} … (100 more characters)')
  replayed = metrics.markdown(row | {'replayed': True, 'written_in_step': 2})
  assert 'written in step: 2' in replayed


def test_a_full_disk_neither_ends_nor_blocks_a_run(tmp_path):
  """The board's thread would die of it, and its queue of ten events would never empty again."""
  board = metrics.Board(tmp_path, 0, None)
  (file,) = board._writer.all_writers.values()
  written = file.event_writer._ev_writer._py_recordio_writer._writer
  with open('/dev/full', 'wb') as full:
    written._file.close()
    written._file = full
    for step in range(1000):
      board.write(step, {'reward': 1.0})
    board.close()
