"""`prefixproxy demo`."""
