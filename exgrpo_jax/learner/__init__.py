"""From a batch to new parameters: gradients, optimizer, and the checkpoints that keep them."""
