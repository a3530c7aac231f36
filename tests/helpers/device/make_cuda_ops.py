"""The table `cuda_ops.json`: the dtypes that torch's own tests list for each operator on CUDA.

    python tests/helpers/device/make_cuda_ops.py    writes it again, for the torch that is installed

torch's list takes seconds to import, so tests read the table, and a slow test compares it with the list.
"""

from __future__ import annotations

import json
import sys
import unittest
from collections import defaultdict
from pathlib import Path
from types import ModuleType

TABLE = Path(__file__).with_name("cuda_ops.json")


def torch_list() -> dict[str, str]:
    """By the operator's name in aten or in torch's list: its dtypes on a GPU of today, sorted, with blanks between."""
    missing = ModuleType("expecttest")  # torch imports it for tests that are not run here
    missing.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", missing)
    from torch.testing._internal import common_cuda

    for name in dir(common_cuda):
        if name.startswith("SM") and name.endswith("OrLater"):  # bfloat16 is listed for newer GPUs alone
            setattr(common_cuda, name, True)
    from torch.testing._internal.common_methods_invocations import op_db

    found: dict[str, set[str]] = defaultdict(set)
    for info in op_db:
        dtypes = {str(dtype).removeprefix("torch.") for dtype in info.supported_dtypes("cuda")}
        for name in (info.name, info.aten_name):
            found[name.removeprefix("nn.functional.")] |= dtypes
    return {name: " ".join(sorted(dtypes)) for name, dtypes in sorted(found.items())}


def table_text(dtypes: dict[str, str]) -> str:
    """The table of a list: the operators of each set of dtypes."""
    operators: dict[str, list[str]] = defaultdict(list)
    for name, of_name in dtypes.items():
        operators[of_name].append(name)
    return json.dumps(dict(sorted(operators.items())), indent=1) + "\n"


def table() -> dict[str, frozenset[str]]:
    """The dtypes of each operator."""
    read = json.loads(TABLE.read_text())
    return {name: frozenset(dtypes.split()) for dtypes, names in read.items() for name in names}


if __name__ == "__main__":
    TABLE.write_text(table_text(torch_list()))
