"""Why a function that a configuration names could not be imported, and what to do about it."""

from __future__ import annotations

import traceback
from pathlib import Path

from asyncrl.errors import ConfigError

REMEDY = "write 'package.module:function' or 'path/to/file.py:function'"


def import_failure(key: str, spec: str, where: str, error: Exception) -> ConfigError:
    """The error for a module or file that cannot be imported.

    Args:
        key: the config key of `spec`.
        spec: what names the function.
        where: its module or file.
        error: what the import raised.
    """
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
