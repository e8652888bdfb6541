"""What the host does beside the device, at growing shares of the paper's scale."""

from collections.abc import Sequence

from exgrpo_jax.performance import buffer_benchmark, start_benchmark

# Each takes a share of the paper's scale and gives figures by name.
_MEASUREMENTS = (buffer_benchmark.measure, start_benchmark.measure)


def run(percents: Sequence[float]) -> None:
  """Prints a row for each figure, with a column for each percentage of the paper's scale."""
  columns = [
    {name: value for measure in _MEASUREMENTS for name, value in measure(percent / 100).items()}
    for percent in percents
  ]
  print(_row("per cent of the paper's scale", *percents))
  for name in columns[0]:
    print(_row(name, *(column[name] for column in columns)), flush=True)


def _row(name: str, *values: float) -> str:
  return f'{name:40}' + ''.join(f'{_rounded(value):>10}' for value in values)


def _rounded(value: float) -> str:
  return f'{value:,.0f}' if value >= 100 else f'{value:.2g}'
