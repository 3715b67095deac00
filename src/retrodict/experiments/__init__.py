"""Experiments: one module each, written with the public API like a user's script."""
