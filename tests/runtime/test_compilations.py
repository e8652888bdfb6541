"""That the console names what JAX compiles, in this version of JAX."""

import jax
import jax.numpy as jnp

from exgrpo_jax.runtime import activity, console


def test_a_program_is_named_while_it_is_compiled_and_no_longer():
  said = []

  def listen(event, duration_secs, **details):
    del duration_secs, details
    if event.startswith('/jax/core/compile/'):
      said.append(activity.now())

  def slow(x):
    return jnp.sin(x) * 3

  x = jnp.ones(3)  # made by a program of its own
  with console.opened(silence=1e9), activity.doing('learn'):
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
      jax.jit(slow)(x)
    finally:
      jax.monitoring.unregister_event_duration_listener(listen)
    assert 'learn: compiling slow (0:00:00)' in said, said
    assert said[-1] == activity.now() == 'learn (0:00:00)'
