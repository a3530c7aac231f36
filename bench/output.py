"""What a bench leaves behind: figures as JSON and a table as Markdown, with the machine that they are of."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any


def machine() -> str:
    return (
        f"{os.cpu_count()} × {platform.machine()}, {platform.system()}, Python {platform.python_version()}."
    )


def bench_parser(name: str, description: str) -> argparse.ArgumentParser:
    """Of `python -m bench.NAME`, with the files that `write_results` writes."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=description)
    parser.add_argument("--json", type=Path, help="figures, and what they are made of")
    parser.add_argument("--table", type=Path, help="Markdown")
    return parser


def write_results(
    json_path: Path | None, result: Any, table_path: Path | None = None, table: str = ""
) -> None:
    """Write the files that were asked for."""
    for path, text in ((json_path, json.dumps(result, indent=1) + "\n"), (table_path, table)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
