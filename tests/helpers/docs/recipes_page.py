"""The table of recipes for GPUs in docs/recipes.md. `python tests/helpers/docs/recipes_page.py` prints it."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.load import CONFIGS
from asyncrl.config.recipes import recipe_heads


def table() -> str:
    """Markdown, of the heads of the files."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "| recipe | trains | hardware | result | an update, predicted |"
    yield "|---|---|---|---|---|"
    for head in recipe_heads():
        if "sync" in head.says:
            path = head.path.relative_to(CONFIGS.parent)
            name = path.relative_to("configs/recipes").with_suffix("")
            seconds = head.says["sync"].partition(",")[0]
            cells = (
                f"[{name}](../{path})",
                head.about.rstrip("."),
                head.says["hardware"],
                head.says["result"],
                seconds,
            )
            yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(table(), end="")
