r"""How well a step must go before replay starts.

exgrpo sweep --sweep=start_pass_rate \
    --config=arithmetic --workdir=/tmp/start_pass_rate
The paper's value is 0.35; with 0 the first success starts it. Arithmetic's warm start ends at a
quarter of the answers right, above the first two. 12 runs of up to ten minutes on two cores; not
yet run as a whole.
"""

from exgrpo_jax.sweeps import trials


def get_sweep():
  return trials.grid({'replay.start_pass_rate': [0.0, 0.2, 0.35, 0.5], 'seed': range(3)})
