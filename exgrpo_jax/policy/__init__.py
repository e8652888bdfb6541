"""The policy: decoder, attention, key/value cache, log-probabilities, and where arrays live."""
