"""What a device reaches in a plain matrix product and a plain copy, and what is published of it."""

from exgrpo_jax.performance import peaks
from exgrpo_jax.performance.measurement import Measurement


def measure(kind: str, dtype: str) -> list[Measurement]:
  """The rates of one device of a `device_kind`, measured and, where it is known, published."""
  measured, published = peaks.measured(dtype), peaks.published(kind)
  found = [
    Measurement('product', measured.flops / 1e12, 'TFLOP/s', f'a plain matrix product in {dtype}'),
    Measurement('copy', measured.bandwidth / 1e9, 'GB/s', 'a plain copy, read and written'),
  ]
  if published:
    found += [
      Measurement('peak product', published.flops / 1e12, 'TFLOP/s', 'published, in bfloat16'),
      Measurement('peak bandwidth', published.bandwidth / 1e9, 'GB/s', 'published'),
    ]
  return found
