"""The chart of a run: rows that have a target, each with its ratio to the baseline; an SVG for light and dark pages.

``make bench`` writes that of its own rows beside its results. ``python -m benchmarks.harness.chart`` draws the one of
docs/performance.md from that page's table, so that the two cannot differ; tests/architecture compares them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.harness.table import Row

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
PICTURE = PAGE.parent / "images" / "performance.svg"
HEAD = "| name | unit | kvgrpc | baseline | ratio | spread | target | peak RSS | baseline is |"

LEAST, MOST = 0.01, 1000.0
LEFT, WIDTH, RIGHT = 250, 400, 230
TOP, LINE, GAP = 64, 16, 10
FONT = 'font-family="system-ui, sans-serif" font-size="12"'
STYLE = """\
  text { fill: #1c2b29 } .n { text-anchor: end } .g { font-size: 11px; fill: #5b6f6b; text-anchor: middle }
  .ground { fill: #fff } .grid { stroke: #dfe7e5 } .one { stroke: #5b6f6b }
  .met { fill: #26a69a } .missed { fill: #fff3e0; stroke: #c05600 } .target { stroke: #1c2b29; stroke-width: 2 }
  .low { fill: #a84800; font-weight: 600 } .head { font-size: 15px; font-weight: 600 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4f2ef } .g { fill: #9db3ae } .ground { fill: #0d1117 }
    .grid { stroke: #24302e } .one { stroke: #9db3ae }
    .met { fill: #4db6ac } .missed { fill: #2b1a08; stroke: #ffa552 } .target { stroke: #e4f2ef } .low { fill: #ffb874 }
  }"""


@dataclass(frozen=True, slots=True)
class Bar:
    """A row of the chart. ``target`` is what the table says of it, as ">= 2.2x" or "<= 50 us"."""

    name: str
    ratio: float
    target: str
    met: bool


def bars_of(rows: Sequence[Row]) -> list[Bar]:
    """The bars of rows that have a target."""
    return [
        Bar(row.metric.name, row.ratio, row.metric.target.describe(row.metric.unit, row.metric.better), bool(row.met))
        for row in rows
        if row.met is not None
    ]


def bars_of_page(text: str) -> list[Bar]:
    """The same of a page that has the table of one whole run, where a ratio that misses its target is bold."""
    _, _, table = text.partition(f"{HEAD}\n")
    found = []
    for line in table.partition("\n\n")[0].splitlines()[1:]:
        name, _, _, _, ratio, _, target, *_ = (cell.strip() for cell in line.strip("| ").split(" | "))
        if target:
            found.append(Bar(name.strip("`"), float(ratio.strip("*")), target, not ratio.startswith("*")))
    return found


def draw(bars: Sequence[Bar]) -> str:
    """The chart as SVG. The axis is logarithmic; what lies past its ends is drawn up to them, and has its figure."""
    families = [list(family) for _, family in groupby(bars, lambda bar: bar.name.split(".")[0])]
    height = TOP + len(bars) * LINE + len(families) * GAP + 20
    lines, y = list[str](), TOP
    for family in families:
        for bar in family:
            lines.extend(_bar(bar, y))
            y += LINE
        y += GAP
    width, met = LEFT + WIDTH + RIGHT, sum(bar.met for bar in bars)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" {FONT}>',
        "<title>kvgrpc beside its baselines</title>",
        f"<desc>{len(bars)} rows of make bench that have a target, with their ratio to the baseline on a logarithmic "
        f"axis; {met} meet it, {len(bars) - met} do not.</desc>",
        f"<style>\n{STYLE}\n</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
        '<text class="head" x="14" y="24">Ratio to the baseline; right of 1 kvgrpc is better</text>',
        f'<rect class="met" x="{LEFT}" y="32" width="22" height="9"/>',
        f'<text x="{LEFT + 28}" y="41">target met</text>',
        f'<rect class="missed" x="{LEFT + 110}" y="32" width="22" height="9"/>',
        f'<text x="{LEFT + 138}" y="41">missed</text>',
        f'<path class="target" d="M{LEFT + 205} 30v13"/>',
        f'<text x="{LEFT + 212}" y="41">the target, where it is a ratio</text>',
        f'<text x="{LEFT + WIDTH + 12}" y="41">ratio</text><text x="{LEFT + WIDTH + 74}" y="41">target</text>',
    ]
    return "\n".join((*head, *_axis(height), *lines, "</svg>\n"))


def _axis(height: int) -> list[str]:
    lines = []
    for power in range(round(math.log10(LEAST)), round(math.log10(MOST)) + 1):
        x, said = _x(10.0**power), f"{10.0**power:g}"
        lines.append(f'<path class="{"one" if power == 0 else "grid"}" d="M{x} {TOP - 8}V{height - 14}"/>')
        lines.append(f'<text class="g" x="{x}" y="{height - 3}">{said}</text>')
    return lines


def _bar(bar: Bar, y: int) -> list[str]:
    begin, end = sorted((_x(1.0), _x(bar.ratio)))
    look, figure = ("met", "") if bar.met else ("missed", "low")
    after, width = LEFT + WIDTH + 12, f"{max(1.0, end - begin):.1f}"
    lines = [
        f'<text class="n" x="{LEFT - 8}" y="{y + 10}">{escape(bar.name)}</text>',
        f'<rect class="{look}" x="{begin}" y="{y + 1}" width="{width}" height="10"/>',
        f'<text class="{figure}" x="{after}" y="{y + 10}">{escape(_figure(bar.ratio))}</text>',
        f'<text x="{after + 62}" y="{y + 10}">{escape(bar.target)}</text>',
    ]
    wanted = re.match(r">= ([\d.]+)x", bar.target)
    if wanted:
        lines.append(f'<path class="target" d="M{_x(float(wanted[1]))} {y - 1}v14"/>')
    return lines


def _figure(ratio: float) -> str:
    """A ratio in so many digits as say something."""
    return f"{ratio:.3g}" if ratio >= LEAST else f"< {LEAST:g}"


def _x(ratio: float) -> float:
    share = math.log10(min(MOST, max(LEAST, ratio)) / LEAST) / math.log10(MOST / LEAST)
    return round(LEFT + WIDTH * share, 1)


if __name__ == "__main__":
    PICTURE.write_text(draw(bars_of_page(PAGE.read_text())))
