"""Files of a stream."""

from contextlib import ExitStack

import pytest

from retrodict.runs import RunError
from retrodict.runs._stream_files import OutputFile

HEADER = b"time,level_mean\n"


@pytest.mark.parametrize("content", [b"", HEADER, HEADER[:5]])
def test_file_without_rows_is_continued_after_a_kill_before_the_first_state(tmp_path, content):
    path = tmp_path / "answers.csv"
    path.write_bytes(content)
    with ExitStack() as files:
        output = OutputFile(path, HEADER, 0, False, files)
        output.write(b"1,2.0\n")
    assert path.read_bytes() == HEADER + b"1,2.0\n"


@pytest.mark.parametrize("content", [HEADER + b"1,2.0\n", b"note\n", b"time,other\n"])
def test_file_with_content_of_its_own_is_refused(tmp_path, content):
    path = tmp_path / "answers.csv"
    path.write_bytes(content)
    with ExitStack() as files, pytest.raises(RunError, match="is not of this stream"):
        OutputFile(path, HEADER, 0, False, files)
    assert path.read_bytes() == content
