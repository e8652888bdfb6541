"""What a policy acts in, turn after turn: the protocol, the processes that hold it, our own."""
