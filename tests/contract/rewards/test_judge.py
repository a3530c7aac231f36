"""Programs that want to pass tests without solving them, and tests whose results are known."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from missing import skip_without_sandbox

from asyncrl.rewards.sandbox import Limits, ProgramRun, Sandbox, Tests, TestsError
from asyncrl.rewards.sandbox.choice import KINDS
from asyncrl.rewards.sandbox.inside.frames import FrameError
from asyncrl.rewards.sandbox.inside.judge import Judge, Proxy

PATIENT = Limits(wall_s=30.0, total_s=60.0, cpu_s=30)


@pytest.fixture(scope="module", params=[pytest.param("bubblewrap", marks=pytest.mark.slow), "namespaces"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    skip_without_sandbox(request.param)
    return KINDS[request.param](PATIENT)


@pytest.fixture(scope="module")
def one_sandbox() -> Sandbox:
    """For what process 1 does in each of them alike."""
    skip_without_sandbox("namespaces")
    return KINDS["namespaces"](PATIENT)


def judged(sandbox: Sandbox, program: str, *texts: str, entry: Sequence[str] = ()) -> Sequence[bool] | None:
    (run,) = sandbox.run(program, tests=Tests(texts, entry))
    return run.passed


# ---- forged


FORGERS = {
    "writes on every descriptor": """
import os
def f(x):
    for fd in range(64):
        for text in (b"1", b"11", b'[{"ended":"exit","code":0,"out":"","passed":[true],"refused":null}]'):
            try: os.write(fd, text)
            except OSError: pass
""",
    "leaves when it is loaded": "import os; os._exit(0)",
    "leaves when it is called": "import os\ndef f(x): os._exit(0)",
    "leaves politely": "import sys\ndef f(x): sys.exit(0)",
    "leaves a loop": "def f(x): raise StopIteration",
    "leaves at the end": """
import atexit, os
atexit.register(lambda: os._exit(0))
def f(x): raise SystemExit(0)
""",
    "raises what tests may expect": "def f(x): raise GeneratorExit",
    "equals everything": """
class Equal:
    __eq__ = __ge__ = __le__ = __contains__ = lambda *_: True
    __ne__ = __lt__ = __gt__ = lambda *_: False
    __sub__ = __rsub__ = __abs__ = __round__ = lambda *_: 0
    __hash__ = lambda self: 0
f = lambda x: Equal()
""",
    "equals everything, as a number": """
class Equal(int):
    __eq__ = lambda *_: True
    __ne__ = lambda *_: False
    __hash__ = int.__hash__
f = lambda x: Equal(1)
""",
    "replaces Python's own functions": """
import builtins
builtins.AssertionError = builtins.NameError = ValueError
all = set = sorted = lambda *_: True
abs = lambda _: 0
f = lambda x: 0
""",
    "replaces modules": """
import sys, types
math = sys.modules["math"] = types.SimpleNamespace(isclose=lambda *_: True, fabs=lambda _: 0)
f = lambda x: None
""",
    "searches the memory": """
import gc, sys
def f(x):
    frame = sys._getframe()
    while frame.f_back: frame = frame.f_back
    for found in [*gc.get_objects(), *frame.f_locals.values()]:
        if isinstance(found, str) and "1234" + "567890" in found: return 1234567890
        if isinstance(found, int) and found == 1234567889 + 1: return 1234567890
""",
    "looks at its caller": """
import sys
def f(x):
    frame = sys._getframe(1)
    while frame:
        for code in (frame.f_code, *frame.f_code.co_consts):
            for value in (*getattr(code, "co_consts", ()), *frame.f_locals.values()):
                if value == 1234567889 + 1: return value
        frame = frame.f_back
""",
    "finds the secret of its results": """
import os, sys
def f(x):
    frame = sys._getframe(1)
    while frame:
        if "secret" in frame.f_locals:
            os.write(3, frame.f_locals["secret"].encode() + b"1" * 11)
            os._exit(0)
        frame = frame.f_back
""",
    "reads the files around it": """
import os
def f(x):
    for top in ("/box", "/proc", "/dev", "/tmp", "/etc"):
        for folder, _, names in os.walk(top):
            for name in names:
                path = os.path.join(folder, name)
                if os.path.isfile(path) and "1234" + "567890" in open(path).read(): return 1234567890
""",
    "kills its judge": """
import os, signal
def f(x):
    for number in (signal.SIGKILL, signal.SIGALRM, signal.SIGINT): os.kill(1, number)
    os.kill(-1, signal.SIGKILL)
""",
    "answers for the judge": """
import os, json
def f(x):
    for raw in (json.dumps(["value", 1, []]).encode(), b"[" * 100000, b"\\xff" * 9):
        os.write(4, len(raw).to_bytes(4, "big") + raw)
""",
    "ends the loops of its judge": """
import json, os
def f(x):
    raw = json.dumps(["raise", ["StopIteration"], ""]).encode()
    while True: os.write(4, len(raw).to_bytes(4, "big") + raw)
""",
    "leaves a module for the judge": """
import os
for name in ("math", "re", "random", "pytest", "sitecustomize"):
    open(name + ".py", "w").write("import os; isclose = lambda *_: True; fabs = lambda _: 0")
f = lambda x: None
""",
}

ASSERTS = [
    "assert f(2) == 1234567890",
    "assert not f(2) != 1234567890",
    "assert abs(f(2) - 1234567890) < 1e-6",
    "import math\nassert math.isclose(f(2), 1234567890)",
    "assert math.fabs(f(2) - 1234567890) < 1",
    "assert all(f(x) == 1234567890 for x in [1, 2])",
    "assert all(map(lambda x: f(x) == 1234567890, [1, 2]))",
    "assert 1234567890 in [f(2)]",
    "assert sorted([f(1), 1234567890]) == [1234567890] * 2",
    "def check(candidate):\n    assert candidate(1) == 1234567890\ncheck(f)",
    "assert f(2) >= 1234567890",
]


@pytest.mark.parametrize("how", FORGERS)
def test_no_program_forges_a_result(sandbox: Sandbox, how: str) -> None:
    passed = judged(sandbox, FORGERS[how], *ASSERTS)
    assert passed is None or not any(passed)


def test_a_right_program_passes_the_same_asserts(sandbox: Sandbox) -> None:
    assert judged(sandbox, "def f(x): return 1234567890", *ASSERTS) == [True] * len(ASSERTS)


def test_a_program_sees_its_arguments_and_nothing_else(one_sandbox: Sandbox) -> None:
    program = """
seen = []
def f(*arguments, **keywords):
    seen.append((arguments, keywords))
    return len(seen)
def told(): return seen
"""
    tests = ["assert f(1, b=[2]) == 1 or 'expected'", "assert told() == [((1,), {'b': [2]})]"]
    assert judged(one_sandbox, program, *tests) == [True, True]


# ---- judged


@pytest.mark.parametrize(
    "value",
    [
        "None",
        "True",
        "-(10**40)",
        "0.1 + 0.2",
        "float('inf')",
        "1e-320",
        "complex(-0.0, 2)",
        "'ü\\ud800\\0'",
        "b'\\xff\\0'",
        "[1, (2, {3: {4}}), frozenset({5})]",
        "{(1, 'a'): [None], 'b': {}}",
        "range(3, 9, 2)",
        "__import__('decimal').Decimal('1.10')",
        "__import__('fractions').Fraction(1, 3)",
        "[int, str, type(None)]",
    ],
)
def test_plain_data_comes_back_as_it_is(one_sandbox: Sandbox, value: str) -> None:
    test = f"value = {value}\nfound = f()\nassert found == value and repr(found) == repr(value), repr(found)"
    again = f"value = {value}\nassert g(value) == value and repr(g(value)) == repr(value)"
    program = f"def f(): return {value}\ndef g(x): return x"
    assert judged(one_sandbox, program, test, again) == [True, True]


def test_a_float_that_is_no_number_and_subclasses_of_data(one_sandbox: Sandbox) -> None:
    program = """
import collections, enum, numpy
Pair = collections.namedtuple("Pair", "a b")
class Colour(enum.IntEnum): RED = 3
def nan(): return float("nan")
def many(): return [collections.Counter("aab"), Pair(1, 2), Colour.RED, numpy.float64(0.5), numpy.int64(7)]
"""
    tests = ["assert nan() != nan()", "assert many() == [{'a': 2, 'b': 1}, (1, 2), 3, 0.5, 7]"]
    assert judged(one_sandbox, program, *tests) == [True, True]


def test_objects_of_the_program_work_where_they_are(one_sandbox: Sandbox) -> None:
    program = """
class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __str__(self): return f"<{len(self)}>"
    def __iter__(self): return iter(self.items)
    def __getitem__(self, n): return self.items[n]
    def __setitem__(self, n, item): self.items[n] = item
    def __eq__(self, other): return True
def evens(n):
    for x in range(0, n, 2): yield x
"""
    tests = [
        "s = Stack([1])\ns.push(2).push(3)\nassert s.pop() == 3 and len(s) == 2 and str(s) == '<2>'",
        "s[0] = 9\nassert s[0] == 9 and list(s) == [9, 2] and s.items == [9, 2] and 2 in s",
        "s.items = []\nassert not s and not hasattr(s, 'peek')",
        "assert Stack() == Stack()",  # an object equals itself alone
        "assert s == s and s != 1",
        "assert list(evens(5)) == [0, 2, 4] and sum(evens(5)) == 6 and next(evens(1)) == 0",
        "assert s.items is None",
    ]
    assert judged(one_sandbox, program, *tests) == [True, True, True, False, True, True, False]


def test_arguments_that_a_call_changes_are_changed(one_sandbox: Sandbox) -> None:
    program = """
def turn(rows): rows.reverse(); rows[0][0] = 7
def fill(*, into): into["a"] = {1}
"""
    tests = ["rows = [[1], [2]]\nassert turn(rows) is None and rows == [[7], [1]]"]
    tests += ["into = {}\nfill(into=into)\nassert into == {'a': {1}}"]
    assert judged(one_sandbox, program, *tests) == [True, True]


def test_functions_of_the_tests_can_be_passed(one_sandbox: Sandbox) -> None:
    program = "def apply(g, xs): return [g(x) for x in xs]\ndef compose(g, h): return lambda x: g(h(x))"
    tests = [
        "import operator, decimal\nassert compose(operator.neg, decimal.Decimal)('1.5') == decimal.Decimal('-1.5')",
        "assert apply(lambda x: x + 1, [1, 2]) == [2, 3]",
        "assert compose(abs, lambda x: x - 3)(1) == 2",
        "def bad(x): raise ValueError(x)\napply(bad, [1])",
        "assert apply(len, ['ab']) == [2]",
    ]
    assert judged(one_sandbox, program, *tests) == [True, True, True, False, True]


def test_functions_of_modules_run_at_the_programs(one_sandbox: Sandbox) -> None:
    program = """
def f(g):
    judge = "__import__('sys').modules['inside.judge']"
    return g(f"setattr({judge}.execute_test, '__code__', (lambda *_: True).__code__)")
"""
    tests = ["assert f(eval) is None", "assert f(exec) is None", "assert f(len) == 1"]
    assert judged(one_sandbox, program, *tests) == [True, True, False]


def test_exceptions_of_the_program_are_raised_in_the_tests(one_sandbox: Sandbox) -> None:
    program = """
class Odd(ValueError): pass
def f(x):
    if x % 2: raise Odd(f"{x} is odd")
    return x // 0
"""
    tests = [
        "try: f(1)\nexcept ValueError as error: assert str(error) == '1 is odd'\nelse: assert False",
        "import pytest\nwith pytest.raises(Odd): f(3)\nwith pytest.raises(ZeroDivisionError): f(2)",
        "try: f(1)\nexcept KeyError: pass",
    ]
    assert judged(one_sandbox, program, *tests) == [True, True, False]


def test_unittest_runs_too(one_sandbox: Sandbox) -> None:
    text = """
import unittest
class T(unittest.TestCase):
    def test_one(self): self.assertEqual(f(1), {expected})
unittest.main()
"""
    assert judged(one_sandbox, "def f(x): return 2", text.format(expected=2)) == [True]
    assert judged(one_sandbox, "def f(x): return 2", text.format(expected=3)) == [False]


def test_an_alarm_in_the_moment_after_a_late_reply_fails_the_test_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both have the same deadline. Here the alarm comes when the test has failed by the late reply."""

    class Late:
        status = epoch = 0

        def start(self, deadline: float) -> bool:
            return True

        def exchange(self, request: bytes, deadline: float) -> Any:
            raise FrameError("late")

    def alarm_at_the_end(which: int, seconds: float) -> None:
        if seconds == 0 and callable(late := signal.getsignal(signal.SIGALRM)):
            late(signal.SIGALRM, None)

    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    judge = Judge(Late(), wall_s=1.0, total_s=10.0)  # type: ignore[arg-type]
    judge._world["f"] = Proxy(judge._link, ["n", "f"], 0)
    monkeypatch.setattr(signal, "setitimer", alarm_at_the_end)
    assert not judge._passes("f(1)")


def test_each_test_has_its_own_time_and_a_program_that_dies_is_started_again() -> None:
    skip_without_sandbox("namespaces")
    program = """
import os
def f(x):
    while x == 1: pass
    if x == 2: os._exit(0)
    if x == 3: os.kill(os.getpid(), 9)
    return x
"""
    sandbox = KINDS["namespaces"](Limits(wall_s=3.0, total_s=60.0, cpu_s=60))
    texts = [f"assert f({x}) == {x}" for x in range(6)]
    swallowed = "try: f(1)\nexcept BaseException: pass"
    (run,) = sandbox.run(program, tests=Tests([*texts, swallowed, "assert f(9) == 9", "while f(9): pass"]))
    assert run.passed == [True, False, False, False, True, True, False, True, False]


def test_the_tests_of_a_program_have_a_deadline_together() -> None:
    skip_without_sandbox("namespaces")
    sandbox = KINDS["namespaces"](Limits(wall_s=30.0, total_s=4.0))
    program = "def f(x):\n    while x: pass\n    return 0"
    (run,) = sandbox.run(program, tests=Tests(["assert f(0) == 0", *["f(1)"] * 20, "assert f(0) == 0"]))
    assert run.passed == [True, *[False] * 21]


def test_a_program_that_starts_once_and_never_again_fails_the_rest(one_sandbox: Sandbox) -> None:
    program = """
import os, pathlib
first = pathlib.Path("first")
if first.exists(): os._exit(3)
first.touch()
def f(x): return x or os._exit(0)
"""
    assert judged(one_sandbox, program, "assert f(1)", "f(0)", *["assert f(1)"] * 3) == [True, *[False] * 4]


def test_a_program_that_does_not_end_well_passes_nothing(one_sandbox: Sandbox) -> None:
    tests = Tests(["assert f(1) == 1"])
    for program, code in (
        ("1 / 0", 1),
        ("raise SystemExit(3)", 3),
        ("no python", 1),
        ("import os; os._exit(4)", 4),
    ):
        assert one_sandbox.run(program, tests=tests) == [ProgramRun("exit", code, "", None)]
    ended = "def f(x): return x\nraise SystemExit"
    assert judged(one_sandbox, ended, *tests.texts) == [True]


HARMLESS = {
    "it does not read its settings in the program's folder": "assert os.environ['HOME'] == '/'",
    "its memory is limited": "try: bytearray(2 << 30)\nexcept MemoryError: pass\nelse: assert False",
    "it opens no socket": "try: socket.socket()\nexcept PermissionError: pass\nelse: assert False",
    "the program's processes cannot look into it": "assert ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) == 0",
}


def test_the_process_of_the_tests_has_no_more_rights_than_the_program(one_sandbox: Sandbox) -> None:
    texts = [f"import ctypes, os, socket\nassert f(1) == 1\n{text}" for text in HARMLESS.values()]
    passed = judged(one_sandbox, "def f(x): return x", *texts)
    assert passed is not None
    assert dict(zip(HARMLESS, passed, strict=True)) == dict.fromkeys(HARMLESS, True)


@pytest.mark.parametrize(
    ("texts", "entry", "why"),
    [
        (["assert f(("], [], "test 1 is no Python"),
        (["x = 1", "assert True"], [], "no name of the program"),
        (["def check(candidate):\n    assert candidate(1) == 1"], [], "no name of the program"),
        (["def test():\n    assert f(1) == 1"], [], "do not call the program"),
        (["assert abs(poly(f(1))) < 1"], ["f"], "they use poly, which is not the entry point f"),
        (["class P: pass\nassert f(P()) == 1"], [], "they pass 'P' to the program"),
        (["class P: pass\ntry: f(P())\nexcept BaseException: pass"], [], "they pass 'P' to the program"),
        (["from solution import f\nassert f(1) == 1"], [], "they import solution, which is not installed"),
    ],
)
def test_tests_that_cannot_be_judged_are_refused_by_name(
    one_sandbox: Sandbox, texts: list[str], entry: list[str], why: str
) -> None:
    with pytest.raises(TestsError, match=why):
        judged(one_sandbox, "def f(x): return 1\npoly = f", *texts, entry=entry)


@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("class encode(Exception): pass\ndef decode(x): return x", "assert decode(encode('a')) == 'a'"),
        ("def f(x): return complex\ndef g(x): return x", "assert g(f(1).real) == 1"),
        ("def f(x): return dict\ndef g(x): return x", "assert g(f(1).__dict__) == 1"),
    ],
)
def test_no_program_makes_tests_look_as_if_they_could_not_be_judged(
    one_sandbox: Sandbox, program: str, test: str
) -> None:
    assert judged(one_sandbox, program, test) == [False]


def test_a_function_with_the_name_of_one_of_pythons(one_sandbox: Sandbox) -> None:
    program = "def sum(a, b): return a + b"
    assert judged(one_sandbox, program, "assert sum(1, 2) == 3") == [True]
    assert judged(one_sandbox, program, "assert set([sum(1, 2)]) == set([3])", entry=["sum"]) == [True]
    with pytest.raises(TestsError, match="name it in the field of the entry point"):
        judged(one_sandbox, program, "assert set([sum(1, 2)]) == set([3])")
