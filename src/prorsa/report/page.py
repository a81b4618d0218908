"""The frame of every page that a command writes: one file, nothing to load, light or dark as the reader's system is."""

from __future__ import annotations

from collections.abc import Sequence

from prorsa.report.legible import escape, shortened
from prorsa.report.svg import Chart, style

MOST_ROWS = 400
"""Rows of a table; of more, the last ones are shown."""

CSS = """
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,'Segoe UI',sans-serif}
main{max-width:1020px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0 0 2px}h2{font-size:18px;margin:40px 0 4px}
p{margin:4px 0 8px;color:var(--soft)}p.problem{color:var(--dropped)}
svg{width:100%;height:auto;display:block}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(190px,1fr));gap:10px;margin:20px 0}
.tile{border:1px solid var(--grid);border-radius:8px;padding:10px 14px}
.tile b{display:block;font-size:22px;font-weight:650}.tile span{color:var(--soft);font-size:13px}
.tile.bad b{color:var(--dropped)}.tile.good b{color:var(--tool)}
.scroll{overflow:auto;max-height:440px}details[open].whole .scroll{max-height:none}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:3px 10px;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}
th{position:sticky;top:0;background:var(--paper)}th:first-child,td:first-child{text-align:left}
details{margin-top:28px}summary{cursor:pointer;font-weight:600;font-size:16px}pre{font-size:12.5px;overflow:auto}
"""


def page(title: str, subtitle: str, problems: Sequence[str], body: Sequence[str]) -> str:
    """The whole document. `body` is markup, everything else is text."""
    head = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(subtitle)}</p>",
        *(f'<p class="problem">Incomplete: {escape(problem)}</p>' for problem in problems),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)} - Prorsa</title><style>{style()}{CSS}</style></head>"
        f"<body><main>{''.join(head)}{''.join(body)}</main></body></html>"
    )


def tiles(figures: Sequence[tuple[str, str, str]]) -> str:
    """(value, words, kind) each; the kind is `good`, `bad` or empty."""
    shown = [
        f'<div class="tile {kind}"><b>{escape(value)}</b><span>{escape(words)}</span></div>'
        for value, words, kind in figures
    ]
    return f'<div class="tiles">{"".join(shown)}</div>'


def section(title: str, chart: Chart | None, words: str) -> str:
    shown = f"{chart.svg()}<p>{escape(words)}</p>" if chart else "<p>There is nothing to show here.</p>"
    return f"<section><h2>{escape(title)}</h2>{shown}</section>"


def table(title: str, words: str, header: Sequence[str], rows: Sequence[Sequence[str]], unfolded: bool = False) -> str:
    """Folded away, unless it is `unfolded` and shown as a whole."""
    shown = rows[-MOST_ROWS:]
    which = f" ({len(rows)})" if len(shown) == len(rows) else f" (last {len(shown)} of {len(rows)})"
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(shortened(cell))}</td>" for cell in row) + "</tr>" for row in shown)
    kind, count = (' open class="whole"', "") if unfolded else ("", which)
    below = f"<p>{escape(words)}</p>" if words else ""
    return (
        f"<details{kind}><summary>{escape(title)}{count}</summary>{below}"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>'
    )
