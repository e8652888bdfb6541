"""Draws studies/theory.png: when a stored success has a larger gradient than a fresh response.

python -m studies.theory

theory.md derives the curves. Slopes are derivatives of the terms in the code's own loss.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from exgrpo_jax.algorithm import objective
from exgrpo_jax.reporting import canvas

PICTURE = pathlib.Path(__file__).with_name('theory.png')

SHAPINGS = {
  'policy_shaping': 'policy_shaping, w/(w + 0.1)',
  'none': 'none, w',
  'unit_slope': 'unit_slope, slope 1 at w = 1',
}


def slope(shaping: str, ratio_N: np.ndarray) -> np.ndarray:
  """Differentiate a replayed token's term by its log-probability, for an advantage of 1.

  `ratio_N` contains the importance ratios w, float32 [N].
  """
  config = objective.ObjectiveConfig(shaping=shaping)

  def term(log_ratio: jax.Array) -> jax.Array:
    return jnp.sum(objective.shaped_ratios(log_ratio, log_ratio, config))

  return np.asarray(jax.grad(term)(jnp.log(ratio_N)))


def quotient(slope_N: np.ndarray, pass_rate_N: np.ndarray) -> np.ndarray:
  """Return a stored success's expected gradient, relative to the fresh response it replaces."""
  return slope_N * (1 - pass_rate_N) / pass_rate_N


def break_even(slope_N: np.ndarray) -> np.ndarray:
  """Return the pass rate below which a stored success outweighs a fresh response."""
  return slope_N / (1 + slope_N)


def draw() -> Figure:
  """Draw the quotient by pass rate at w = 1 (left) and the break-even pass rate by w (right)."""
  figure, ((by_rate, by_age),) = canvas.grid(1, 2)
  pass_rate_N = np.linspace(0.02, 0.98, 193)
  ratio_N = np.geomspace(0.01, 10, 241, dtype=np.float32)
  for (shaping, name), style in zip(SHAPINGS.items(), canvas.styles()):
    if shaping != 'none':  # at w = 1, its curve equals the curve of unit_slope
      here = quotient(slope(shaping, np.array([1.0], np.float32)), pass_rate_N)
      by_rate.plot(pass_rate_N, here, label=name, linewidth=1.5, **style)
    by_age.plot(ratio_N, break_even(slope(shaping, ratio_N)), label=name, linewidth=1.5, **style)
  by_rate.axhline(1, color=canvas.GREY, linewidth=0.8)
  by_rate.text(0.97, 1.3, 'as large as one', ha='right', fontsize=8, color=canvas.GREY)
  by_rate.axvline(0.5, color=canvas.GREY, linewidth=0.8, linestyle=':')
  by_rate.text(0.48, 0.0015, 'drawn most', ha='right', fontsize=8, color=canvas.GREY)
  by_rate.set(yscale='log', xlim=(0, 1), ylim=(0.001, 60))
  by_rate.set_xticks([k / 8 for k in range(1, 8)], [f'{k}/8' for k in range(1, 8)])
  by_age.axvline(1, color=canvas.GREY, linewidth=0.8, linestyle=':')
  by_age.text(0.9, 0.75, 'as written', ha='right', fontsize=8, color=canvas.GREY)
  by_age.set(xscale='log', ylim=(0, 0.8))
  by_age.set_xticks([0.01, 0.1, 1, 10], ['1/100', '1/10', '1', '10'])
  canvas.label(by_rate, 'A stored success, at w = 1', 'gradient, in fresh responses', 'pass rate')
  canvas.label(
    by_age,
    'Larger than a fresh one, below',
    'pass rate',
    'w: probability of a token, now / then',
  )
  canvas.legend(figure, [by_age, by_rate])
  return figure


if __name__ == '__main__':
  with canvas.style():
    canvas.save(draw(), PICTURE)
