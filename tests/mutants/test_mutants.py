"""The list of broken lines fits the source of today, so that it cannot rot; and its runner tells caught from missed."""

from __future__ import annotations

import ast
import re
from collections import Counter

import pytest

from .patches import ROOT, Mutant, read_mutants

MUTANTS = read_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_entry_fits_the_source(mutant: Mutant) -> None:
    broken = mutant.broken()
    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse((ROOT / mutant.file).read_text()))
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file(), f"{mutant.name}: no file {file}"
        function = re.escape(name.partition("[")[0].rpartition("::")[2])
        assert re.search(
            rf"^\s*(async )?def {function}\(" if name else "", (ROOT / file).read_text(), re.M
        ), test


def test_names_are_unique() -> None:
    assert not [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1]


def test_a_text_that_is_gone_is_refused_by_name() -> None:
    gone = Mutant(
        "gone", "nothing", "asyncrl/errors.py", "no such text", "", ("tests/unit/rpc/test_keys.py",)
    )
    with pytest.raises(ValueError, match=r"gone: asyncrl/errors\.py holds the text of `old` 0 times"):
        gone.broken()
