"""What divides the sums over a minibatch's tokens, as a weight of each token. Pure, NumPy."""

import numpy as np


def token_weights(mask_BT: np.ndarray, aggregation: str, max_response: int) -> np.ndarray:
  """The share of each token of a minibatch in its policy term: [B, T] -> [B, T].

  constant: 1 / (B max_response), so neither length nor grouping carries bias
  (Dr. GRPO); token_mean: 1 / tokens (DAPO); sequence_mean: 1 / (B own length) (GRPO).
  """
  num_rows = mask_BT.shape[0]
  if aggregation == 'constant':
    return mask_BT / np.float32(num_rows * max_response)
  if aggregation == 'token_mean':
    return mean_weights(mask_BT)
  length_B1 = mask_BT.sum(axis=1, keepdims=True)
  return mask_BT / (num_rows * np.maximum(length_B1, 1))


def mean_weights(mask_BT: np.ndarray) -> np.ndarray:
  """The share of each token in a mean over all of a minibatch's: [B, T] -> [B, T]."""
  return mask_BT / np.maximum(mask_BT.sum(), 1)
