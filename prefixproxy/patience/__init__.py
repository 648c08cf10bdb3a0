"""Keeping the client of a stream from leaving while it waits for its first token."""
