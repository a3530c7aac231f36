"""Text of users, such as the message of an exception, as terminals and log files may have it."""

from __future__ import annotations

from rich.text import Text

CONTROL = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Characters that move a cursor, change colours or ring a bell."""


def without_control(text: str) -> str:
    """
    >>> without_control("\\x1b[31mred\\x1b[0m, [/bold]\\r")
    '[31mred[0m, [/bold]'
    """
    return text.translate(CONTROL)


def cell(text: object) -> Text:
    """A cell or title of a table. Square brackets are no markup in it."""
    return Text(without_control(str(text)))
