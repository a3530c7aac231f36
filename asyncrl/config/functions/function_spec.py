"""Functions named in a config: 'package.module:function' or 'path/to/file.py:function'."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.config.functions.notebook_cell import CellError, module_text, stands_in_cells
from asyncrl.errors import ConfigError

_running: list[Path] = []
"""Files that are being imported."""


def load_function(spec: str, key: str) -> Callable[..., Any]:
    """The function that `spec` names. Raises ConfigError under `key` if there is none or its module fails.

    A file is loaded once, under a private module name: what stands under `if __name__ == "__main__"` does not
    run.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name.isidentifier():
        stem, _, last = spec.rpartition(".")
        file = f"{stem.removesuffix('.py').replace('.', '/')}.py"
        near = f"did you mean {file}:{last}?" if stem and last != "py" and Path(file).is_file() else REMEDY
        raise ConfigError(key, spec, "does not name a function", near)
    try:
        module = _load_file(Path(where)) if where.endswith(".py") else _import(where)
    except ConfigError:
        raise
    except Exception as error:
        raise import_failure(key, spec, where, error) from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ConfigError(
            key, spec, f"{where} has no function {name!r}", f"define {name} there, or name another"
        )
    return found


def name_function(
    function: Callable[..., Any], key: str, keep: Callable[[str, str], Path] | None = None
) -> str:
    """The spec under which `load_function` finds this function again, in another process.

    keep: writes a module of a name and a text, and returns where. With it functions of notebook cells have a spec too.

    Raises ConfigError for what has no name at the top level of a module (lambdas, methods, inner functions), and for a
    function of a cell whose source is not known or that needs what cannot be written into a file.
    """
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", ""))
    if module is None or getattr(module, name, None) is not function:
        raise ConfigError(
            key, function, "cannot be imported by name", "define it with def at the top level of a file"
        )
    if stands_in_cells(module):
        return f"{_kept_module(function, key, keep)}:{name}"
    if "." in module.__name__ or not hasattr(module, "__file__"):
        return f"{module.__name__}:{name}"
    # A script, or a file beside one: other processes do not have its folder on their path.
    return f"{Path(str(module.__file__)).resolve()}:{name}"


def _kept_module(function: Callable[..., Any], key: str, keep: Callable[[str, str], Path] | None) -> Path:
    why = "other processes must import it"
    try:
        if keep is not None:
            return keep(function.__name__, module_text(function))
    except CellError as error:
        why = f"{why}, but {error}"
    rule = f"stands in no file (a notebook, an interactive session, standard input?), and {why}"
    raise ConfigError(key, function, rule, "move it to a .py file, and import it from there")


def refuse_in_import() -> None:
    """Raise ConfigError while `load_function` runs a file: a script must begin its work under its guard."""
    if _running:
        rule = "begins a run while it is imported for its functions, as every process of a run does"
        raise ConfigError("script", str(_running[-1]), rule, "begin it under `if __name__ == '__main__':`")


def _import(module: str) -> ModuleType:
    """From the working folder too, after all other places: a file there hides no module of Python."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    return importlib.import_module(module)


def origin_of(function: Callable[..., Any]) -> tuple[Path, str]:
    """The file of a function and its name there. The script that starts a run is executed twice, as a script and as the
    file that the configuration names: its functions are then the same ones."""
    return Path(inspect.getfile(function)).resolve(), function.__qualname__


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


REMEDY = "write 'package.module:function' or 'path/to/file.py:function'"


def import_failure(key: str, spec: str, where: str, error: Exception) -> ConfigError:
    """The error for a module or file, `where`, that cannot be imported."""
    said = f"{type(error).__name__}: {error}"
    if where.endswith(".py") and not Path(where).is_file():
        return ConfigError(key, spec, f"there is no file {where} (in {Path.cwd()})", REMEDY)
    if (
        isinstance(error, ModuleNotFoundError)
        and error.name
        and (where == error.name or where.startswith(f"{error.name}."))
    ):
        named = f"there is no module {error.name}"
        return ConfigError(key, spec, named, f"{REMEDY}; a module is found in {Path.cwd()} or installed")
    rule = f"{where} is there and cannot be imported ({said}{_place(where, error)})"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return ConfigError(
            key, spec, rule, f"install {error.name.partition('.')[0]}, or take its import out of {where}"
        )
    return ConfigError(
        key,
        spec,
        rule,
        f"correct {where}; `python {where}` shows the whole traceback"
        if where.endswith(".py")
        else f"correct it; `python -m {where}` shows the whole traceback",
    )


def _place(where: str, error: Exception) -> str:
    """', rewards.py line 3': the last line of the user's own file that led there."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    name = Path(where).name if where.endswith(".py") else f"{where.rpartition('.')[2]}.py"
    own = [frame for frame in frames if Path(frame.filename).name == name]
    return f", {name} line {own[-1].lineno}" if own else ""
