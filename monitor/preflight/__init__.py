"""Checks before a run starts: its configuration, and the environment it will meet."""
