"""Output to terminals and pipes: one that may lose its reader, and text of users without control characters."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

NO_READER = (errno.EIO, errno.EPIPE, errno.ENXIO)
"""Errors of a write to a terminal or a pipe that has no reader any more."""

CONTROL = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Characters that move a cursor, change colours or ring a bell."""


class LastingOutput:
    """A text stream that drops everything from the first write on that finds no reader.

    Errors of other kinds, e.g. a full disk, stay errors.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop_the_rest(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop_the_rest(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop_the_rest(self, error: OSError) -> None:
        if error.errno not in NO_READER:
            raise error
        drop_output(self._stream)


def drop_output(stream: TextIO) -> None:
    """Lead the descriptor of a stream to nowhere, so that what its buffer still holds can be written, too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)
    with suppress(OSError):
        stream.flush()


@contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, stdout and stderr are `LastingOutput`: a run does not end because nobody reads what it shows. Output that
    is left at the end and finds no room is dropped: the result of the command stands."""
    before = sys.stdout, sys.stderr
    lasting = [cast(TextIO, LastingOutput(stream)) for stream in before]
    sys.stdout, sys.stderr = lasting
    try:
        yield
    finally:
        for stream in lasting:
            try:
                stream.flush()
            except OSError:
                drop_output(stream)
        sys.stdout, sys.stderr = before


def within_line(text: str) -> str:
    """Text of others, e.g. the name of a process, as a part of a line: it can neither begin a line nor turn the
    direction of writing.

    >>> within_line("gen\\n\\x1b[31m[/x] \\u202egnp 日本")
    'gen [31m[/x]  gnp 日本'
    """
    return "".join(c if c.isprintable() else " " for c in without_control(text))


def without_control(text: str) -> str:
    """
    >>> without_control("\\x1b[31mred\\x1b[0m, [/bold]\\r")
    '[31mred[0m, [/bold]'
    """
    return text.translate(CONTROL)
