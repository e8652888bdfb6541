"""The paper: what a token's loss is, what the buffer keeps and draws, which questions come next."""
