"""Lines of the answers of a stream."""

import json

import numpy as np

from retrodict.runs._stream_lines import Answers, Shown, as_lines, header

ANSWERS = Answers(
    times=np.array([3.0]),
    filtered=(np.array([[1.0, 2.0, 3.0]]), np.array([[0.1, 0.2, 0.3]])),
    smoothed_times=np.array([2.0]),
    smoothed=(np.array([[4.0, 5.0, 6.0]]), np.array([[0.4, 0.5, 0.6]])),
    ready=np.array([True]),
)
SHOWN = Shown([0, 2], ["level", "season"])


def test_lines_have_the_shown_states_under_their_names():
    names = header(SHOWN.names).decode().strip().split(",")
    (line,) = as_lines(ANSWERS, SHOWN, False).decode().splitlines()
    cells = dict(zip(names, map(float, line.split(",")), strict=True))
    assert cells["level_mean"] == 1.0 and cells["season_std"] == 0.3
    assert cells["season_smoothed_mean"] == 6.0 and cells["level_smoothed_std"] == 0.4
    assert cells["time"] == 3.0 and cells["smoothed_time"] == 2.0 and len(cells) == 10


def test_json_lines_have_the_shown_states():
    answer = json.loads(as_lines(ANSWERS, SHOWN, True))
    assert answer["filtered"] == {
        "level": {"mean": 1.0, "std": 0.1},
        "season": {"mean": 3.0, "std": 0.3},
    }
    assert list(answer["smoothed"]) == ["level", "season"]
