"""The page of a run: what it holds, that it is safe and whole, that its charts can be zoomed."""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from retrodict._files import as_csv
from retrodict._pages import visible
from retrodict.experiments._drawing import draw
from retrodict.experiments._report import Chapter, Section, Table
from retrodict.experiments._report import page as experiment_page
from retrodict.runs import _page, _stream_learning
from retrodict.runs._page import page
from retrodict.runs._plot import plot
from retrodict.runs._report_content import (
    Band,
    Curve,
    Finding,
    Panel,
    ParameterLine,
    PlottedSeries,
    ReportContent,
)

EVIL = """<script>alert('x')</script> & "q" </title></style> <!-- <b onclick=alert(1)>"""
VOID = {"meta", "path", "img"}


def make_panel(
    num_times: int = 60, title: str = "flow", dated: bool = True, level: float = 0.0, seed: int = 0
) -> Panel:
    rng = np.random.default_rng(seed)
    mean = level + np.cumsum(rng.normal(size=num_times))
    observed = mean + rng.normal(size=num_times)
    observed[num_times // 3 : num_times // 2] = np.nan
    start: Any = np.datetime64("2020-01-01") if dated else 1871
    days = np.arange(num_times + 5).astype("timedelta64[D]" if dated else int)
    ahead = np.full(5, mean[-1])
    return Panel(
        title,
        Band(start + days[:num_times], mean, mean - 1, mean + 1),
        observed=observed,
        forecast=Band(start + days[num_times:], ahead, ahead - 2, ahead + 2),
    )


def make_content(series: list[PlottedSeries] | None = None, name: str = "flow") -> ReportContent:
    steps = np.arange(100)
    return ReportContent(
        title=name,
        verdict="doubtful",
        summary=[f"A summary of {name}."],
        data=[f"column {name}"],
        series=series
        or [PlottedSeries(name, [make_panel(title=name)]), PlottedSeries("other", [make_panel()])],
        parameters=[
            ParameterLine(name, 0.30412, 0.0123, (0.2846, 0.3251)),
            ParameterLine("prior.mean", 2.0, learned=False),
        ],
        parameters_method=f"From the curvature, {name}.",
        training=[Curve(name, steps, -1.0 - 900.0 * np.exp(-steps / 2.0))],
        training_label=f"ELBO of {name}",
        diagnostics=[Finding(name, "0.62", name, "doubtful")],
        commands=[f"retrodict fit {name}"],
        facts=[(name, name)],
    )


class Outline(HTMLParser):
    """The elements of a page; complains where they do not nest."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str):
        assert self.open.pop() == tag

    def handle_comment(self, data: str):
        raise AssertionError(f"a comment: {data}")

    def handle_data(self, data: str):
        self.texts.append(data)


def payload(text: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="payload">(.*?)</script>', text, re.S)
    assert match
    return json.loads(match[1])


def times_of(axis: dict[str, Any]) -> np.ndarray:
    if "values" in axis:
        return np.array(axis["values"], float)
    return axis["start"] + axis["step"] * np.arange(axis["count"])


def floats(values: list[float | None]) -> np.ndarray:
    return np.array([np.nan if v is None else v for v in values], float)


def make_chapters(name: str) -> str:
    """The report of an experiment in which every text is this name."""
    picture = draw("figure", lambda axis: axis.set_title(visible(name)), caption=name)
    table = Table("table", {name: "", "n": ".1f"}, [[name, 1.0]], name)
    section = Section(name, name, [picture, table, name], name)
    chapters = [Chapter(id, name, name, [section], {}, {}) for id in ("a", "b")]
    return experiment_page(name, [name], chapters, name).decode()


PAGES = {"run": lambda name: page(make_content(name=name)), "experiments": make_chapters}


@pytest.mark.parametrize("kind", PAGES)
def test_hostile_names_are_escaped_in_every_page(kind: str):
    plain, evil = Outline(PAGES[kind]("flow")), Outline(PAGES[kind](EVIL))
    # The same elements with the same attributes, but for the names in them.
    free = {"aria-label", "content", "src"}
    outlines = [
        [
            (tag, {k: v for k, v in attrs.items() if k not in free})
            for tag, attrs in outline.elements
        ]
        for outline in (plain, evil)
    ]
    assert outlines[0] == outlines[1]
    assert sum(EVIL in text for text in evil.texts) >= 12


def test_hostile_names_are_escaped_in_json_and_svg(tmp_path: Path):
    data = payload(page(make_content(name=EVIL)))
    assert data["series"][0]["name"] == data["series"][0]["panels"][0]["title"] == EVIL
    plot([make_panel(title=EVIL)], tmp_path / "plot.svg", title=EVIL)
    header = as_csv([*_stream_learning.FIRST_COLUMNS, EVIL], [[1, 0, -1.0, 0, 0.5]])
    (tmp_path / "history.csv").write_bytes(header)
    _stream_learning.draw_history(tmp_path / "history.csv", tmp_path / "history.svg")
    for name in ("plot.svg", "history.svg"):
        tags = {
            str(each.tag).rpartition("}")[2] for each in ElementTree.parse(tmp_path / name).iter()
        }
        assert not tags & {"script", "b"} and "svg" in tags


def test_page_is_self_contained():
    text = page(make_content())
    for _, attributes in Outline(text).elements:
        assert not {"href", "srcset", "data"} & set(attributes)
        assert (attributes.get("src") or "data:").startswith("data:")
    assert "://" not in text and "url(" not in text and "@import" not in text
    # The browser is told so, and runs the one script that the page came with.
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    script = re.search(r"<script>(.*?)</script>", text, re.S)
    assert policy and script
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert policy[1].startswith("default-src 'none';") and f"'sha256-{digest}'" in policy[1]


def test_pages_are_deterministic():
    assert page(make_content()) == page(make_content())


def test_page_shows_all_sections_but_empty_ones():
    headings = re.findall(r"<h2>(.*?)</h2>", page(make_content()))
    assert headings == [
        "Data",
        "Series",
        "Parameters",
        "Training",
        "Diagnostics",
        "How to reproduce",
    ]
    bare = ReportContent(title="t", verdict=None, summary=["s"], data=[], series=[])
    text = page(bare)
    assert "<h2>" not in text and "<script" not in text and "<p>s</p>" in text


def test_parameters_are_rounded_to_their_error():
    lines = [
        ParameterLine("a", -1234567.891, 3.2, (-1234573.1, -1234562.6)),
        ParameterLine("b", 0.30412, 0.0123, (0.28461, 0.32514)),
        ParameterLine("c", 2.0, learned=False),
    ]
    content = ReportContent("t", None, [], [], [], parameters=lines, level=0.8)
    cells = re.findall(r"<td[^>]*><span>(.*?)</span></td>", page(content))
    assert cells[:5] == ["a", "−1234567.9", "3.2", "−1234573.1 to −1234562.6", "learned"]
    assert cells[5:10] == ["b", "0.3041", "0.012", "0.2846 to 0.3251", "learned"]
    assert cells[10:] == ["c", "2", "–", "–", "fixed"]
    assert "80% interval" in page(content)


@pytest.mark.parametrize("dated", [True, False])
@pytest.mark.parametrize("level", [0.0, 1e6])
def test_page_data_round_trip(dated: bool, level: float):
    panel = make_panel(dated=dated, level=level)
    data = payload(page(make_content([PlottedSeries("s", [panel])])))
    (chart,) = data["series"][0]["panels"]
    axis = data["axes"][chart["axis"]]
    assert axis["kind"] == ("date" if dated else "number") and "count" in axis
    unit = "datetime64[ms]" if dated else float
    np.testing.assert_array_equal(times_of(axis), panel.smoothed.times.astype(unit).astype(float))
    # However high the level, what varies is kept.
    spread = np.ptp(panel.smoothed.centre)
    band = panel.smoothed
    columns: dict[str, Any] = {"centre": band.centre, "lower": band.lower, "upper": band.upper}
    columns["observed"] = panel.observed
    for name, expected in columns.items():
        values = floats(chart[name])
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-5 * spread)
    assert chart["missing"] == list(range(20, 30))
    assert panel.forecast is not None
    ahead = panel.forecast.centre
    np.testing.assert_allclose(floats(chart["forecast"]["centre"]), ahead, rtol=1e-5)


@pytest.mark.parametrize(
    "times, kind",
    [
        (np.array(["2020-01-31", "2020-02-29", "2020-03-31"], "datetime64[D]"), "date"),
        (np.array(["1500-01", "1500-02", "2900-03"], "datetime64[M]"), "date"),
        (
            np.datetime64("2020-01-01T00:00:00.000250", "us")
            + 125 * np.arange(9).astype("timedelta64[us]"),
            "date",
        ),
        (np.array([0.1, 0.25, 7.125]), "number"),
        (0.1 * np.arange(50), "number"),
        (np.array([20200101, 20200102]), "number"),
    ],
)
def test_page_times_round_trip_exactly(times: np.ndarray, kind: str):
    zeros = np.zeros(times.size)
    panel = Panel("t", Band(times, zeros, zeros, zeros))
    data = payload(page(make_content([PlottedSeries("s", [panel, panel])])))
    (axis,) = data["axes"]  # both panels share it
    exact = times.astype("datetime64[us]").astype(float) / 1000 if kind == "date" else times
    assert axis["kind"] == kind
    np.testing.assert_array_equal(times_of(axis), exact)


def test_non_finite_values_are_null():
    values = np.array([np.inf, -np.inf, np.nan, 1.5])
    panel = Panel("t", Band(np.arange(4), values, values, values), observed=values)
    (chart,) = payload(page(make_content([PlottedSeries("s", [panel])])))["series"][0]["panels"]
    assert chart["centre"] == chart["observed"] == [None, None, None, 1.5]
    assert chart["missing"] == [2]


def test_omitted_series_are_counted(monkeypatch: pytest.MonkeyPatch):
    series = [PlottedSeries(f"s{i}", [make_panel(10)]) for i in range(53)]
    text = page(make_content(series))
    assert len(payload(text)["series"]) == 50
    assert "The first 50 of 53 series are on this page; 3 are left out." in text
    monkeypatch.setattr(_page, "MAX_NUMBERS", 4 * 10 * 7)
    assert len(payload(page(make_content(series)))["series"]) == 7
    monkeypatch.setattr(_page, "MAX_NUMBERS", 1)
    assert len(payload(page(make_content(series)))["series"]) == 1


def test_page_of_a_long_series_stays_small():
    panel = make_panel(100_000)
    level = Panel("level", panel.smoothed)
    text = page(make_content([PlottedSeries("s", [panel, level])]))
    assert 1e6 < len(text.encode()) < 6e6


def test_a_static_picture_of_a_long_series_is_small():
    panel = make_panel(100_000)
    text = page(make_content([PlottedSeries("s", [panel])]))
    (picture, training) = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', text)
    svg = base64.b64decode(picture).decode()
    assert len(svg) < 300_000 and "flow" in svg and "<image" in svg
    assert b"ELBO" not in base64.b64decode(training)  # the label is the caption


@pytest.mark.parametrize("first", ["-0500-01-01", "0001-01-01", "19000-01-01"])
def test_dates_and_values_beyond_those_of_matplotlib_are_drawn(first: str):
    times: Any = np.datetime64(first) + np.array([0, 10, 400_000]).astype("timedelta64[D]")
    values = np.array([-1.7e308, np.inf, 1.7e308])
    text = page(
        make_content([PlottedSeries("s", [Panel("p", Band(times, values, values, values))])])
    )
    assert text.count('src="data:image/svg+xml') == 2


def test_a_static_picture_has_at_most_twelve_panels():
    text = page(make_content([PlottedSeries("s", [make_panel(10, f"p{i}p") for i in range(14)])]))
    (picture, _) = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', text)
    svg = base64.b64decode(picture).decode()
    assert "p11p" in svg and "p12p" not in svg


def test_training_chart_ignores_poor_first_values():
    text = page(make_content())
    cut = int(re.findall(r"(\d+) values are below the chart", text)[0])
    assert 0 < cut <= 10
    steady = np.linspace(0, 1, 100)
    assert _page._limits(steady) == (None, 0)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p: replace(p.smoothed, times=p.smoothed.times[::-1]), "increasing"),
        (lambda p: replace(p.smoothed, centre=p.smoothed.centre[:-1]), "centre` must have one"),
        (lambda p: replace(p.smoothed, times=p.smoothed.times.astype(str)), "datetime64"),
        (lambda p: replace(p, observed=p.observed[:-1]), "observed` must have one"),
        (
            lambda p: replace(p, smoothed=replace(p.smoothed, times=np.arange(60))),
            "both be dates or both be numbers",
        ),
        (lambda p: PlottedSeries("s", []), "no panels"),
        (lambda p: PlottedSeries("s", [p, make_panel(dated=False)]), "share an axis"),
        (lambda p: ReportContent("t", None, [], [], [], level=90.0), "between 0 and 1"),
    ],
)
def test_wrong_content_is_refused(make: Callable[[Panel], object], message: str):
    with pytest.raises(ValueError, match=message):
        make(make_panel())


# The still picture of `plot`.


@pytest.mark.parametrize(
    "suffix, start", [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_plots_are_deterministic(tmp_path: Path, suffix: str, start: bytes):
    import matplotlib

    before = dict(matplotlib.rcParams)
    panels = [make_panel(title="a $name_ 100%"), make_panel(seed=1)]
    contents = []
    for name in ("one", "two"):
        plot(panels, tmp_path / f"{name}.{suffix}", title="x$")
        contents.append((tmp_path / f"{name}.{suffix}").read_bytes())
    assert contents[0] == contents[1] and contents[0].startswith(start)
    assert dict(matplotlib.rcParams) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"one.{suffix}", f"two.{suffix}"]


def test_a_plot_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"a.gif: a picture ends in .png, .svg, .pdf"):
        plot([make_panel()], tmp_path / "a.gif")
    with pytest.raises(ValueError, match="no panels"):
        plot([], tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install"):
        plot([make_panel()], tmp_path / "a.png")


# In a browser.

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")

FRAME = """<!doctype html><body><script>
addEventListener("message", event => {
  const answer = document.createElement("pre");
  answer.id = "answer";
  answer.textContent = event.data;
  document.body.append(answer);
});
</script><iframe src="page.html" style="width:WIDTHpx;height:2400px;border:0"></iframe></body>"""

# What is asked is told to the frame around, once the page has drawn itself.
ASK = """<script>
addEventListener("load", () => {
  const host = document.getElementById("charts"), root = document.documentElement;
  const view = () => [host.dataset.from, host.dataset.to].map(Number);
  const canvas = index => host.querySelectorAll("canvas")[index];
  const at = (index, share) => {
    const box = canvas(index).getBoundingClientRect();
    return { clientX: box.left + share * box.width, clientY: box.top + 50,
      bubbles: true, cancelable: true };
  };
  let answer;
  try { answer = (() => { SCRIPT })(); } catch (error) { answer = String(error); }
  parent.postMessage(JSON.stringify(answer), "*");
});
</script>"""


def browse(folder: Path, address: Path) -> str:
    assert BROWSER
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--dump-dom", f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=9000"]
    done = subprocess.run([*command, address.as_uri()], capture_output=True, text=True, timeout=120)
    return done.stdout


def ask(folder: Path, text: str, script: str, width: int = 1280) -> Any:
    """The answer of a script that runs in the page, in a frame of this width."""
    # What is asked is a second script, which the page would not let run.
    text = re.sub(r"<meta http-equiv[^>]*>", "", text)
    text = text.replace("</body>", ASK.replace("SCRIPT", script) + "</body>")
    (folder / "page.html").write_text(text, encoding="utf-8")
    (folder / "frame.html").write_text(FRAME.replace("WIDTH", str(width)))
    match = re.search(r'<pre id="answer">(.*?)</pre>', browse(folder, folder / "frame.html"), re.S)
    assert match
    return json.loads(html.unescape(match[1]))


def numbered(num_times: int = 2000) -> str:
    panels = [make_panel(num_times, dated=False), make_panel(num_times, dated=False, seed=1)]
    return page(make_content([PlottedSeries("s", panels)]))


needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


@pytest.mark.slow
@needs_browser
def test_page_runs_in_a_browser(tmp_path: Path):
    (tmp_path / "page.html").write_text(page(make_content(name=EVIL)), encoding="utf-8")
    dom = browse(tmp_path, tmp_path / "page.html")
    assert len(re.findall("<canvas", dom)) == 1 and "data-from=" in dom
    assert "2020-01-01 to 2020-03-05" in dom


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_fits_the_window(width: int, tmp_path: Path):
    name = "a_long_name_without_any_place_to_break_it_" * 4
    measured = ask(
        tmp_path,
        page(make_content(name=name)),
        "return { width: root.clientWidth, over: root.scrollWidth - root.clientWidth,"
        " canvas: canvas(0).clientWidth, small: [...document.querySelectorAll('td, th, p, li, dd')]"
        ".map(e => parseFloat(getComputedStyle(e).fontSize)).reduce((a, b) => Math.min(a, b)) };",
        width,
    )
    assert measured["width"] == width and measured["over"] <= 0 and measured["small"] >= 12
    assert measured["canvas"] >= 0.75 * min(width, 992)


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_charts_are_zoomed_and_moved(width: int, tmp_path: Path):
    script = """
      const wheel = (share, deltaY, index = 0) =>
        canvas(index).dispatchEvent(new WheelEvent("wheel", { ...at(index, share), deltaY }));
      const touch = (type, id, share) => canvas(0).dispatchEvent(
        new PointerEvent(type, { ...at(0, share), pointerId: id }));
      const press = key => canvas(0).dispatchEvent(new KeyboardEvent("keydown", { key }));
      const title = () => host.querySelector(".tip:not([hidden]) b")?.textContent;
      const found = { start: view() };
      found.untouched = wheel(0.5, 300);                         // all is seen: the page scrolls
      touch("pointermove", 1, 0.75);
      found.under = title();
      wheel(0.75, -200); wheel(0.75, -200); wheel(0.75, -200, 1);
      found.zoomed = view();
      touch("pointermove", 1, 0.75);
      found.stillUnder = title();
      touch("pointerdown", 1, 0.5); touch("pointermove", 1, 0.6); touch("pointerup", 1, 0.6);
      found.dragged = view();
      touch("pointerdown", 1, 0.4); touch("pointerdown", 2, 0.6);
      touch("pointermove", 2, 0.8); touch("pointerup", 1, 0.4); touch("pointerup", 2, 0.8);
      found.pinched = view();
      canvas(0).dispatchEvent(new MouseEvent("dblclick", at(0, 0.5)));
      found.reset = view();
      press("+"); found.plus = view();
      press("ArrowRight"); found.right = view();
      press("ArrowRight"); found.edge = view();
      press("-"); press("-"); found.minus = view();
      for (let i = 0; i < 60; i++) press("+");
      found.least = view();
      press("0"); found.zero = view();
      document.getElementById("zoom-in").click(); found.button = view();
      found.range = document.getElementById("range").textContent;
      return found;"""
    measured = ask(tmp_path, numbered(), script, width)
    assert isinstance(measured, dict), measured
    start, spans = (
        measured["start"],
        {k: np.ptp(v) for k, v in measured.items() if isinstance(v, list)},
    )
    full_span = spans["start"]
    assert start[0] < 1871 and start[1] > 1871 + 2004
    assert measured["untouched"] is True  # not prevented
    # Three turns of the wheel, one of them on the other panel, about the time under the pointer.
    np.testing.assert_allclose(spans["zoomed"], full_span * np.exp(-1.2), rtol=1e-6)
    assert abs(int(measured["under"]) - int(measured["stillUnder"])) <= 1
    # A drag to the right shows what is earlier, as far as the pointer went.
    moved = measured["zoomed"][0] - measured["dragged"][0]
    assert 0.1 * spans["zoomed"] <= moved <= 0.13 * spans["zoomed"]
    np.testing.assert_allclose(spans["dragged"], spans["zoomed"])
    np.testing.assert_allclose(spans["pinched"], spans["dragged"] / 2, rtol=1e-3)
    assert measured["reset"] == measured["zero"] == measured["minus"] == start
    np.testing.assert_allclose(spans["plus"], 0.7 * full_span)
    np.testing.assert_allclose(measured["right"][0] - measured["plus"][0], 0.2 * spans["plus"])
    np.testing.assert_allclose(measured["edge"][1], start[1])  # no further than the data
    np.testing.assert_allclose(spans["edge"], spans["plus"])
    assert 2 <= spans["least"] <= 10
    np.testing.assert_allclose(spans["button"], 0.6 * full_span)
    first, last = map(int, measured["range"].split(" to "))
    assert first == np.ceil(measured["button"][0]) and last == np.floor(measured["button"][1])


@pytest.mark.slow
@needs_browser
def test_series_can_be_selected(tmp_path: Path):
    series = [
        PlottedSeries("a", [make_panel(50)]),
        PlottedSeries(EVIL, [make_panel(1, title=EVIL, dated=False), make_panel(2, dated=False)]),
    ]
    script = """
      const select = document.getElementById("series");
      select.value = "1";
      select.dispatchEvent(new Event("change"));
      return [[...host.querySelectorAll("figcaption")].map(e => e.textContent),
        document.getElementById("range").textContent, document.scripts.length];"""
    titles, shown, num_scripts = ask(tmp_path, page(make_content(series)), script)
    assert titles == [EVIL, "flow"] and shown == "1871 to 1877" and num_scripts == 3


@pytest.mark.slow
@needs_browser
def test_chart_thinning_keeps_the_extremes(tmp_path: Path):
    num_times, width = 100_000, 700
    text = page(make_content([PlottedSeries("s", [make_panel(num_times, dated=False)])]))
    script = f"""
      const payload = JSON.parse(document.getElementById("payload").textContent);
      const values = payload.series[0].panels[0].observed.map(v => v === null ? NaN : v);
      const times = values.map((_, i) => 1871 + i);
      return retrodict.decimate(times, values, 11871, 81871, {width})
        .map(bin => [bin.column, bin.low, bin.high, bin.count]);"""
    bins = np.array(ask(tmp_path, text, script))
    values = floats(payload(text)["series"][0]["panels"][0]["observed"])
    columns = np.arange(num_times) // 100 - 100
    finite = np.isfinite(values)
    expected = [
        (c, values[here].min(), values[here].max(), here.sum())
        for c in range(width)
        if (here := (columns == c) & finite).any()
    ]
    within = (bins[:, 0] >= 0) & (bins[:, 0] < width)
    np.testing.assert_array_equal(bins[within], np.array(expected))
    assert len(bins) <= width + 2


@pytest.mark.slow
@needs_browser
def test_time_axis_ticks_are_round(tmp_path: Path):
    script = """
      const spans = [0.05, 2, 90, 7200, 86400, 864000, 6e6, 4e7, 4e8, 4e9, 4e10].map(s => 1000 * s);
      const start = Date.UTC(2021, 10, 17, 13, 47, 11);
      return spans.map(span => retrodict.dateTicks(start, start + span, 8)
        .map(tick => [tick.at - start, tick.label, new Date(tick.at).toISOString()]));"""
    axes = ask(tmp_path, page(make_content()), script)
    spans = [0.05, 2, 90, 7200, 86400, 864000, 6e6, 4e7, 4e8, 4e9, 4e10]
    for span, ticks in zip(spans, axes, strict=True):
        offsets = [tick[0] for tick in ticks]
        assert 2 <= len(ticks) <= 9 and offsets == sorted(offsets)
        assert 0 <= offsets[0] and offsets[-1] <= 1000 * span
        assert all(label for _, label, _ in ticks)
    labels = [[label for _, label, _ in ticks] for ticks in axes]
    # The first mark says what no other does.
    assert labels[3] == ["17 Nov 14:00", *(f"14:{m}" for m in (15, 30, 45)), *labels[3][4:]]
    assert labels[7][:3] == ["2022", "Mar", "May"] and labels[6][0].endswith(" 2021")
    assert {np.datetime64(stamp[:10]).astype(object).weekday() for _, _, stamp in axes[6]} == {0}
    assert all(stamp.endswith("-01-01T00:00:00.000Z") for _, _, stamp in axes[9])


@pytest.mark.parametrize(
    "name", ["bell\x07", "\udcff", "nul\x00", "\u202etxt", "two\nlines\u2028", "\ufffe", "-->$\\x$"]
)
def test_non_text_names_are_marked(name: str, tmp_path: Path):
    text = page(make_content(name=name))
    text.encode()  # as it is written
    Outline(text)
    assert not re.search("[\x00-\x08\x7f\u2028-\u202e\ufffe]", text)
    shown = payload(text)["series"][0]["name"]
    assert shown == payload(text)["series"][0]["panels"][0]["title"]
    assert shown.isprintable() and "\n" not in shown
    plot([make_panel(title=name)], tmp_path / "name.svg", title=name)
    tree = ElementTree.parse(tmp_path / "name.svg")
    assert not [each for each in tree.iter() if str(each.tag).endswith("script")]
