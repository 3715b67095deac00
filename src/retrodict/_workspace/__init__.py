"""Folders of long computations, which are written atomically and resume after interruption."""

from retrodict._workspace.files import as_csv as as_csv
from retrodict._workspace.files import as_json as as_json
from retrodict._workspace.files import hold as hold
from retrodict._workspace.files import hold_folder as hold_folder
from retrodict._workspace.files import library_version as library_version
from retrodict._workspace.files import make_writable as make_writable
from retrodict._workspace.files import write_atomically as write_atomically
from retrodict._workspace.folder import Folder as Folder
from retrodict._workspace.folder import Progress as Progress
from retrodict._workspace.folder import Quiet as Quiet
from retrodict._workspace.folder import Stage as Stage
