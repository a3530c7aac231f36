"""Functions named in a config: 'package.module:function' or 'path/to/file.py:function'."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.errors import ConfigError

_running: list[Path] = []
"""Files that are being imported."""

REMEDY = "write 'package.module:function' or 'path/to/file.py:function'"


def load_function(spec: str, key: str) -> Callable[..., Any]:
    """The function that `spec` names. Raises ConfigError under `key` if there is none or its module fails.

    A file is loaded once, under a private module name: what stands under `if __name__ == "__main__"` does not
    run.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name.isidentifier():
        raise ConfigError(key, spec, "does not name a function", REMEDY)
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            key, spec, f"{where} cannot be imported ({type(error).__name__}: {error})", REMEDY
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(
            key, spec, f"{where} has no function {name!r}", f"define {name} there, or name another"
        )
    return found


def name_function(function: Callable[..., Any], key: str) -> str:
    """The spec under which `load_function` finds this function again, in another process.

    Raises ConfigError under `key` for what has no name at the top level of a module: lambdas, methods, inner functions.
    """
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", ""))
    if module is None or getattr(module, name, None) is not function:
        raise ConfigError(
            key, function, "cannot be imported by name", "define it with def at the top level of a file"
        )
    if "." in module.__name__:
        return f"{module.__name__}:{name}"
    # A script, or a file beside one: other processes do not have its folder on their path.
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).is_file():  # '<stdin>'
        raise ConfigError(
            key,
            function,
            "stands in no file (a notebook, an interactive session?), and other processes must import it",
            "move it to a .py file",
        )
    return f"{Path(file).resolve()}:{name}"


def refuse_in_import() -> None:
    """Raises ConfigError while `load_function` runs a file for its functions: what a script does beside defining some
    belongs under its guard."""
    if _running:
        raise ConfigError(
            "script",
            str(_running[-1]),
            "begins a run while it is imported for its functions, as every process of a run does",
            "begin it under `if __name__ == '__main__':`",
        )


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    name = f"_asyncrl_file_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # files beside it import as they do when it is run as a script
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up there
    _running.append(path)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _running.pop()
    return module
