"""How often a policy is right, and which policy a command asks."""
