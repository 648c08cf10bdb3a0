"""The subcommands: each its options, and the call of its package's `command.py`, imported when it is run."""
