"""`asyncrl report`: the page of the dashboard as one HTML file, with its scripts and the data of some runs inside.

The file requests nothing: its Content-Security-Policy names the hashes of its own scripts and styles, and pictures are
data. Lanes are one reduction of the whole run, in COLUMNS columns; spans have no details.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.observability.dash.page_data import Answer, PageData, View
from asyncrl.observability.dash.page_files import STATIC
from asyncrl.system.disk import replace_text

COLUMNS = 4000
MOST_ROLLOUTS = 200
MOST_PICTURES = 50
ROLES_OPENED = 32
"""Processes of a run up to which each has lanes of its own."""

LINK = re.compile(r'<link rel="stylesheet" href="static/([\w./]+)">')
SCRIPT = re.compile(r'<script src="static/([\w./]+)" defer></script>')


def write_report(folders: Sequence[Path], output: Path) -> int:
    """Write the report of some runs and return its size in bytes. OSError where it cannot be written."""
    text = report([PageData(folder) for folder in folders])
    replace_text(output, text)
    return len(text.encode())


def report(runs: Sequence[PageData]) -> str:
    for run in runs:
        run.read()
        run.find(logs=False)
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    styles, scripts = LINK.findall(page), SCRIPT.findall(page)
    style = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in styles)
    script = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in scripts)
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    data = _in_a_script(msgspec.json.encode({"runs": [_embedded(run) for run in runs]}).decode())
    page = SCRIPT.sub("", LINK.sub("", page))
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
    end = f'<script type="application/json" id="embedded">{data}</script>\n<script>{script}</script>\n'
    # Replaced by position: the texts may hold anything that a pattern would read.
    before, after = page.split("<title>", 1)
    body, rest = after.split("</body>", 1)
    return f"{before}{head}<title>{body}{end}</body>{rest}"


def _embedded(run: PageData) -> Answer:
    """All answers about a run that its page requests."""
    start, end = run.bounds()
    roles = {process.role for process in run.timeline.processes.values()}
    opened = frozenset(roles if len(run.timeline.processes) <= ROLES_OPENED else ())
    rollouts = run.rollouts((0.0, float("inf")), (-float("inf"), float("inf")), MOST_ROLLOUTS)
    state = run.state()
    del state["folder"]  # the report is sent around
    return {
        "state": state,
        "lanes": run.lanes(View(start, max(end, start + 1e-3), COLUMNS, opened)) | {"many": []},
        "rollouts": rollouts,
        "images": _pictures(run, rollouts["rows"]),
    }


def _pictures(run: PageData, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Pictures of rollouts by their paths, as data."""
    found: dict[str, str] = {}
    named = (row["images"] for row in rows if isinstance(row.get("images"), list))
    for path in dict.fromkeys(str(path) for each in named for path in each):
        if len(found) < MOST_PICTURES and (picture := run.image(path)) is not None:
            file, media = picture
            found[path] = f"data:{media};base64,{base64.b64encode(file.read_bytes()).decode()}"
    return found


def _in_a_script(text: str) -> str:
    """JSON that cannot end the element that it is in.

    >>> _in_a_script('["</script><!--"]')
    '["\\\\u003c/script>\\\\u003c!--"]'
    """
    return text.replace("<", "\\u003c")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
