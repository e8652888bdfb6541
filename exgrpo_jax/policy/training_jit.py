"""`jax.jit` for programs on the training mesh, with the compiler options of its platform."""

import functools
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from exgrpo_jax.policy import sharding

_OPTIONS: dict[str, dict[str, str]] = {  # by platform: compilers refuse options of another
  # Otherwise a product with weights that are split over all chips becomes a loop over their shards,
  # each too thin for the matrix units. In MiB; no product is as large.
  'tpu': {'xla_jf_spmd_threshold_for_windowed_einsum_mib': '1000000'},
}

_Arguments = ParamSpec('_Arguments')
_Result = TypeVar('_Result')


class TrainingJit(Generic[_Arguments, _Result]):
  """A jitted function whose platform is that of the mesh of `jax.set_mesh` when it is called."""

  def __init__(self, function: Callable[_Arguments, _Result], **options: Any) -> None:
    functools.update_wrapper(self, function)
    self._on = functools.cache(
      lambda platform: jax.jit(function, compiler_options=_OPTIONS.get(platform), **options)
    )

  def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
    """The function's result."""
    return self._on(sharding.platform())(*args, **kwargs)

  def lower(self, *args: Any) -> jax.stages.Lowered:
    """Lowers the function for arguments of these shapes; see `jax.stages.Wrapped.lower`."""
    return self._on(sharding.platform()).lower(*args)


def jit_for_training(
  *, static_argnums: int | tuple[int, ...], donate_argnums: tuple[int, ...] = ()
) -> Callable[[Callable[_Arguments, _Result]], TrainingJit[_Arguments, _Result]]:
  """A decorator that takes arguments of `jax.jit`."""
  return lambda function: TrainingJit(
    function, static_argnums=static_argnums, donate_argnums=donate_argnums
  )
