"""Whether a response is right: a verifier that runs in processes of its own, under hard limits."""
