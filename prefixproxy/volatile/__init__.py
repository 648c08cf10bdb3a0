"""Rules: which text of a head is volatile, and what becomes of it."""
