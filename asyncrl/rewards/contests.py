"""A reward for problems of programming contests, whose tests are stored as in LiveCodeBench and DeepCoder.

    [{"input": "3\\n1 2 3", "output": "6", "testtype": "stdin"}, …]           a program that reads stdin
    [{"input": "[1, 2]\\n3", "output": "6", "testtype": "functional"}, …]     Solution().function([1, 2], 3) == 6

The list is JSON. LiveCodeBench's private tests are that text within a pickle, compressed and in base64. Nothing is
unpickled here, which could run code: the text is read from the pickle's opcodes.
"""

from __future__ import annotations

import base64
import json
import pickletools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from asyncrl.rewards.unit_tests import UnitTests
from asyncrl.types import Task

MOST_BYTES = 1 << 29
"""Of the tests of one problem, decompressed."""

TEXTS = {"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
AROUND = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}
"""The other opcodes in the pickle of a text."""

StoredTest = Mapping[str, Any]


class ContestTests:
    """1 if the program passes all tests of the task, else 0.

    tests     fields of task.data with tests, stored as above; those that a task does not have are left out
    function  the field with the method that functional tests call; a test may also name it as `fn_name`
    options   of `UnitTests`: partial, sandbox and the limits
    """

    def __init__(
        self,
        tests: Sequence[str] = ("tests", "public_test_cases", "private_test_cases"),
        function: str = "function",
        **options: Any,
    ) -> None:
        self._tests, self._function = tests, function
        self._judge = UnitTests("tests", "cases", entry="entry_point", **options)

    def __call__(self, task: Task, text: str) -> float:
        """Raises ValueError for a task that cannot be judged."""
        found = [test for name in self._tests if name in task.data for test in stored_tests(task.data[name])]
        if not found:
            raise ValueError(f"task.data has no tests in {', '.join(self._tests)}")
        method = task.data.get(self._function) or found[0].get("fn_name")
        judged = [as_assert(test, method) for test in found] if method else list(map(as_case, found))
        data = {"tests": judged, "entry_point": "Solution"} if method else {"cases": judged}
        return self._judge(replace(task, data=data), text)


def stored_tests(text: str) -> list[StoredTest]:
    """Raises ValueError for what is no list of tests."""
    tests = json.loads(text if text.lstrip().startswith("[") else unpacked(text))
    if not isinstance(tests, list) or not all(
        isinstance(test, dict) and {"input", "output"} <= test.keys() for test in tests
    ):
        raise ValueError("tests are no list of {input, output}")
    return tests


def unpacked(text: str) -> str:
    """The text in base64(zlib(pickle(text))). Raises ValueError for anything else."""
    try:
        stream = zlib.decompressobj()
        raw = stream.decompress(base64.b64decode(text, validate=True), MOST_BYTES)
        opcodes = [(opcode.name, value) for opcode, value, _ in pickletools.genops(raw)]
    except (ValueError, zlib.error) as error:
        raise ValueError(f"tests are neither JSON nor a packed text: {error}") from None
    if not stream.eof:
        raise ValueError(f"tests are cut off, or of more than {MOST_BYTES} bytes")
    texts = [value for name, value in opcodes if name in TEXTS]
    strange = {name for name, _ in opcodes} - TEXTS - AROUND
    if len(texts) != 1 or strange:
        raise ValueError(
            f"tests are packed with more than a text: {', '.join(sorted(strange)) or len(texts)}"
        )
    return str(texts[0])


def as_case(test: StoredTest) -> dict[str, str]:
    """For a program that reads stdin. Some sets have lists of lines."""
    sides = {side: test[side] for side in ("input", "output")}
    return {side: "\n".join(map(str, it)) if isinstance(it, list) else str(it) for side, it in sides.items()}


def as_assert(test: StoredTest, method: str) -> str:
    """
    >>> as_assert({"input": '[1, 2]\\n"a"', "output": "3"}, "count")
    "assert Solution().count([1, 2], 'a') == 3"
    """
    if not method.isidentifier():
        raise ValueError(f"tests call {method!r}, which is no name")
    given, wanted = test["input"], test["output"]
    arguments = [json.loads(line) for line in given.splitlines() if line] if isinstance(given, str) else given
    value = json.loads(wanted) if isinstance(wanted, str) else wanted
    return f"assert Solution().{method}({', '.join(map(repr, arguments))}) == {value!r}"
