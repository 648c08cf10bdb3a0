"""`prefixproxy simulate`."""
