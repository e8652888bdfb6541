"""Environments for many turns: the protocol, the processes that hold them, our own."""
