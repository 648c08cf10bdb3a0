"""`prefixproxy lint`."""
