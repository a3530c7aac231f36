"""The files of the page: written by hand, with uPlot's beside them, and served as they are."""

from __future__ import annotations

from pathlib import Path

STATIC = Path(__file__).parent / "static"
FILES = {
    "app.js": "text/javascript",
    "charts.js": "text/javascript",
    "lanes.js": "text/javascript",
    "rollouts.js": "text/javascript",
    "style.css": "text/css",
    "vendor/uPlot.iife.min.js": "text/javascript",
    "vendor/uPlot.min.css": "text/css",
    "vendor/uPlot.LICENSE": "text/plain",
}
"""Name below static/ ▸ media type. No other name is answered."""
