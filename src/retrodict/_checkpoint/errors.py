"""What goes wrong with files."""


class CheckpointError(ValueError):
    """A file cannot be loaded: it is damaged, not a checkpoint, or does not fit what was asked."""


class DamagedError(CheckpointError):
    """What the file holds is not what was written to it, so that an older file may be better."""
