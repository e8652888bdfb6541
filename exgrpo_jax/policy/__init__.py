"""The language model: decoder, attention, key/value cache, log-probabilities, and where they live."""
