"""What the sums over a minibatch's tokens are divided by, as a weight per token. Pure, NumPy."""

import chex
import numpy as np


def token_weights(mask_BT: np.ndarray, aggregation: str, max_response: int) -> np.ndarray:
  """Weight of each token in the policy term: [B, T] -> [B, T].

  constant: 1 / (B max_response), so neither length nor grouping carries bias
  (Dr. GRPO); token_mean: 1 / tokens (DAPO); sequence_mean: 1 / (B own length) (GRPO).
  """
  chex.assert_rank(mask_BT, 2)
  num_rows = mask_BT.shape[0]
  if aggregation == 'constant':
    return mask_BT / np.float32(num_rows * max_response)
  if aggregation == 'token_mean':
    return mean_weights(mask_BT)
  length_B1 = mask_BT.sum(axis=1, keepdims=True)
  return mask_BT / (num_rows * np.maximum(length_B1, 1))


def mean_weights(mask_BT: np.ndarray) -> np.ndarray:
  """Weight of each token in a mean over all tokens of a minibatch: [B, T] -> [B, T]."""
  return mask_BT / np.maximum(mask_BT.sum(), 1)
