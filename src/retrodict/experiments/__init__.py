"""Experiments: one module each, standing on the public API as a user's script would."""
