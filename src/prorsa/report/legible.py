"""Names as text, for terminals and pages: of tools, tasks, files and whatever else somebody outside has chosen.

A name is never markup, never moves a cursor or changes a colour, and can always be written out: what is unseen or has no code
is shown as an escape.
"""

from __future__ import annotations

import html
import re

from rich.text import Text

MOST = 200
"""Characters of a name in a table or a page."""
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)
"""Control characters, those that change the direction of writing, and halves of characters."""


def legible(text: str, lines: bool = False) -> str:
    """The text with everything unseen as `\\x1b`, `\\u202e` and the like; `lines`: ends of lines stay."""
    return _UNSEEN.sub(lambda found: "\n" if lines and found[0] == "\n" else ascii(found[0])[1:-1], text)


def shortened(text: str, most: int = MOST) -> str:
    text = legible(text)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def escape(text: str, lines: bool = False) -> str:
    """For HTML and SVG."""
    return html.escape(legible(text, lines))


def plain_text(text: str, style: str = "") -> Text:
    """For rich."""
    return Text(legible(text), style=style)
