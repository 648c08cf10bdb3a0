"""`prefixproxy bench`."""
