r"""The paper's table: six in-distribution and three out-of-distribution benchmarks.

exgrpo evaluate --suite=paper --model=Qwen2.5-Math-1.5B --name='Base model' \
    --config=qwen2_5_math_1_5b --out=/tmp/table
exgrpo evaluate --suite=paper --checkpoint=/tmp/run --name=ExGRPO --out=/tmp/table
The files are the authors' test sets, in the folder ExGRPO/data of github.com/ElliottYan/LUFFY. In
these files, AIME and AMC list each question 32 times. Use `--data` to read other files. We did not
have the authors' file for MMLU-Pro, and assume that its source is called mmlu_pro, like the file.
"""

from exgrpo_jax.reporting.benchmark_table import Benchmark, Suite

_IN, _OUT = 'test.id.parquet', 'test.ood.parquet'


def get_suite():
  return Suite(
    benchmarks=(
      Benchmark('AIME24', data=_IN, source='aime', group='in', samples=32),
      Benchmark('AIME25', data=_IN, source='aime25', group='in', samples=32),
      Benchmark('AMC', data=_IN, source='amc', group='in', samples=32),
      Benchmark('MATH-500', data=_IN, source='math', group='in', samples=1),
      Benchmark('Minerva', data=_IN, source='minerva', group='in', samples=1),
      Benchmark('OlympiadBench', data=_IN, source='olympiad_bench', group='in', samples=1),
      Benchmark('ARC-c', data=_OUT, source='arc_c', group='out', samples=1),
      Benchmark('GPQA-diamond', data=_OUT, source='gpqa', group='out', samples=1),
      Benchmark('MMLU-Pro', data=_OUT, source='mmlu_pro', group='out', samples=1),
    ),
    settings={
      'evaluation.temperature': 0.6,
      'evaluation.top_k': 0,
      'evaluation.top_p': 1.0,
      'evaluation.min_p': 0.0,
      'evaluation.require': ('think', 'box'),
      'rollout.max_prompt': 4096,
      'rollout.max_response': 8192,
      'data.on_overlong': 'refuse',  # because a part of a benchmark is not the same benchmark
    },
  )
