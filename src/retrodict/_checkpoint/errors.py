"""Errors of checkpoint files."""


class CheckpointError(ValueError):
    """A file that cannot be loaded: damaged, not a checkpoint, or of another structure."""


class DamagedError(CheckpointError):
    """A file whose content was altered after writing, so that an older file may be better."""
