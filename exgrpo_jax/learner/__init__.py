"""The learner: gradients, optimizer and checkpoints."""
