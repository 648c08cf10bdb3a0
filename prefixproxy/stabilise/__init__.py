"""Makes a prompt the same from turn to turn."""
