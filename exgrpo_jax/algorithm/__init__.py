"""The ExGRPO paper: token losses, what the buffer keeps and draws, which questions come next."""
