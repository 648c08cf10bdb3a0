"""`prefixproxy doctor`: what about a server defeats reuse, with the evidence and the flag to change."""
