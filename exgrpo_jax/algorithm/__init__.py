"""The ExGRPO algorithm: token losses, the replay buffer and the order of questions."""
