"""The policy: decoder, attention, key/value cache, log-probabilities, and array sharding."""
