"""Save and load objects, one file per object."""

from retrodict._checkpoint.file import load as load
from retrodict._checkpoint.file import read_checkpoint as read_checkpoint
from retrodict._checkpoint.file import save as save
from retrodict._checkpoint.file import write_checkpoint as write_checkpoint
from retrodict._checkpoint.names import CheckpointError as CheckpointError
