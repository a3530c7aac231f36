"""Tests of contests as data sets store them: read whole, or refused; nothing that is stored is run while it is read."""

from __future__ import annotations

import base64
import json
import pickle  # noqa: TID251  the data set's own way of writing
import zlib

import pytest
from hub_rows import CALL, STDIN, packed
from hypothesis import given
from hypothesis import strategies as some
from missing import skip_without_sandbox

from asyncrl.rewards import contests
from asyncrl.rewards.contests import ContestTests, as_case, stored_tests, unpacked
from asyncrl.types import Task


def in_base64(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw)).decode()


@given(some.text(), some.integers(0, pickle.HIGHEST_PROTOCOL))
def test_a_packed_text_is_read_as_pickle_reads_it(text: str, protocol: int) -> None:
    assert unpacked(in_base64(pickle.dumps(text, protocol))) == text


class Opener:
    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, ("made-by-a-pickle", "w")


@pytest.mark.parametrize(
    "value", [Opener(), ["a"], {"a": "b"}, 5, ("a", "b"), b"a"], ids=lambda value: type(value).__name__
)
def test_a_pickle_of_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"packed with more than a text|neither JSON nor"):
        unpacked(in_base64(pickle.dumps(value)))


@pytest.mark.parametrize("text", ["", "?", "QQ==", in_base64(b""), in_base64(b"\x80\x04"), packed("[]")[:-8]])
def test_broken_tests_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="tests are"):
        unpacked(text)


def test_tests_that_are_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contests, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match=r"more than 100 bytes|neither JSON nor"):
        unpacked(packed("a" * 1000))


@pytest.mark.parametrize("stored", ['["a"]', '[{"input": "1"}]', packed('{"input": 1, "output": 2}')])
def test_what_is_no_list_of_tests_is_refused(stored: str) -> None:
    with pytest.raises(ValueError, match="no list of"):
        stored_tests(stored)


def test_lines_in_lists_are_joined() -> None:
    assert as_case({"input": [1, "2"], "output": ["3"]}) == {"input": "1\n2", "output": "3"}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"tests": "[]"}, "no tests"),
        ({}, "no tests"),
        ({"tests": json.dumps([CALL]), "function": "total(), 1 or __import__('os').f"}, "no name"),
    ],
)
def test_a_task_that_cannot_be_judged_fails(data: dict[str, str], why: str) -> None:
    skip_without_sandbox()
    with pytest.raises(ValueError, match=why):
        ContestTests()(Task(0, "?", data), "```python\nprint(1)\n```")


def test_all_lists_of_tests_count_and_a_share_is_given_where_it_is_wanted() -> None:
    skip_without_sandbox()
    other = {**STDIN, "input": "5\n", "output": "10\n"}
    task = Task(
        0, "?", {"public_test_cases": json.dumps([STDIN]), "private_test_cases": packed(json.dumps([other]))}
    )
    four = "```python\nprint(4)\n```"
    assert (ContestTests()(task, four), ContestTests(partial=True)(task, four)) == (0.0, 0.5)
