"""`prefixproxy verify`."""
