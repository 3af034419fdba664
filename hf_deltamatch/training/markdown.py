"""Names in Markdown, for reports and cards."""

from __future__ import annotations


def cell(text: str) -> str:
    """As a cell of a table holds it: on one line, a ``|`` not the end of it."""
    return " ".join(text.split()).replace("|", "\\|")
