"""Questions whose answers lie in the user's own files: a tool that searches them.

    files ─▸ passages ─▸ index (BM25) ◂─ search(query) ─ turn      a turn without a call is the answer
                                      ─▸ passages ─────▸ next turn

A paragraph of a .txt or .md file is a passage, and so is the text of a row of a .jsonl file. The ranking is Lucene's
BM25, by the package bm25s (the extra `search`).
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from asyncrl.config.functions.function_spec import load_function
from asyncrl.config.rules import require
from asyncrl.errors import ConfigError
from asyncrl.generator.agents.env import ToolEnvironment
from asyncrl.system.packages import imported
from asyncrl.tasks.datasets.rows import JsonlRows

KINDS = (".txt", ".md", ".jsonl")
TEXT_FIELDS = ("text", "contents", "content")
"""Where a row of a .jsonl file may have its text."""


class Index:
    """Passages by the words in them. Raises ConfigError without the package bm25s."""

    def __init__(self, passages: Sequence[str]) -> None:
        bm25s = imported("bm25s", "search", "agent.environment", f"{__name__}:Search")
        logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets DEBUG for itself
        self.passages, self._bm25s = passages, bm25s
        self._ranking = bm25s.BM25(method="lucene", backend="numpy")
        self._ranking.index(self._words(list(passages)), show_progress=False)

    def best(self, query: str, k: int) -> list[str]:
        """The passages that fit the query best, at most k, best first. Each shares a word with it."""
        words = self._words([query])
        if not words[0]:
            return []
        k = min(k, len(self.passages))
        found, scores = self._ranking.retrieve(words, k=k, show_progress=False, backend_selection="numpy")
        return [self.passages[at] for at, score in zip(found[0], scores[0], strict=True) if score > 0]

    def _words(self, texts: list[str]) -> list[list[str]]:
        return self._bm25s.tokenize(
            texts, stopwords=None, token_pattern=r"(?u)\b\w+\b", return_ids=False, show_progress=False
        )


class Search(ToolEnvironment):
    """A tool `search`.

    Args:
        documents: Files, e.g. 'notes/**/*.md', or several such texts, or 'module:function' that returns passages.
        k: Passages of a result.
        options: Keywords of `ToolEnvironment`.
    """

    def __init__(self, documents: str | list[str], k: int = 3, **options: Any) -> None:
        require(k > 0, "k", k, "is no number of passages", "set k=3")
        self._index, self._k = index_of(*([documents] if isinstance(documents, str) else documents)), k
        super().__init__([self.search], **options)
        self.stateless = True

    @classmethod
    def check(cls, documents: str | list[str], k: int = 3, **options: Any) -> None:
        """Index the documents, for this process."""
        cls(documents, k, **options)

    def search(self, query: str) -> str:
        """Search the documents.

        Args:
            query: words that the passage should have
        """
        found = enumerate(self._index.best(query, self._k), start=1)
        return "\n".join(f"[{place}] {passage}" for place, passage in found) or "nothing found"


@cache
def index_of(*documents: str) -> Index:
    """The index of these documents, made once in each process. Raises ConfigError where there is nothing to search."""
    return Index([passage for one in documents for passage in _passages(one)])


def _passages(documents: str) -> list[str]:
    key = "documents"
    if ":" in documents and not glob.has_magic(documents):
        return list(load_function(documents, key)())
    paths = sorted(Path(path) for path in glob.glob(documents, recursive=True))
    kept = [path for path in paths if path.suffix in KINDS]
    rule, remedy = f"matches no {', '.join(KINDS)} file (in {Path.cwd()})", "give other files"
    require(bool(kept), key, documents, rule, remedy)
    found = [passage for path in kept for passage in _passages_of_file(path)]
    require(bool(found), key, documents, "matches files without text", remedy)
    return found


def _passages_of_file(path: Path) -> list[str]:
    if path.suffix == ".jsonl":
        rows = JsonlRows(path, "agent.options.documents")
        return [_text_of(rows[at], rows.place(at)) for at in range(len(rows))]
    return [" ".join(part.split()) for part in path.read_text("utf-8").split("\n\n") if part.strip()]


def _text_of(row: Any, place: str) -> str:
    for field in TEXT_FIELDS:
        if isinstance(row, dict) and isinstance(row.get(field), str):
            return row[field]
    rule = f"{place} has none of {', '.join(TEXT_FIELDS)}"
    raise ConfigError("documents", str(place), rule, "name the text of each row so")
