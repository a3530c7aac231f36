"""RUN/rollouts.jsonl: rollouts as text, for people and the dashboard.

For the first version and every `telemetry.rollouts_every`-th: the worst and the best rollout of a few of the groups
that it was trained on, with their rewards and every token of the policy.

    {"version": 10, "ordinal": 117, "prompt": "4+5=", "answer": "0,9>9", "reward": 1.0, "parts": {"right": 1.0},
     "tokens": 5, "versions": [8, 9], "finish": "stop", "images": ["images/9f3c….png"],
     "segments": [[{"text": "4+5=", "by": "prompt"},
                   {"text": "0", "version": 8, "logprob": -0.31, "learner_logprob": -0.35}, …]]}

A segment is a list of pieces: one for each token of the policy, one for each stretch between them, which is of the
`prompt` or of the `environment` (tools too). learner_logprob is by the policy that the version began with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers.decoders import DecodeStream

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.models.loading import load_tokenizer
from asyncrl.models.prompts import images_in
from asyncrl.system.disk import writing
from asyncrl.telemetry.sinks import JsonlSink
from asyncrl.types import Array, Group, Rollout, Task, Version

FILE, IMAGES = "rollouts.jsonl", "images"
GROUPS = 4
"""Most groups of one version."""

DIGITS = 5
"""Decimals of a log-prob."""

Piece = dict[str, Any]


class RolloutLog:
    """resume_at: the version that a run is resumed from; later rows are cut off."""

    def __init__(self, run_folder: Path, config: Config, resume_at: Version | None) -> None:
        self._folder, self._text = run_folder, TokenText(config)
        self._sink = JsonlSink(run_folder / FILE, resume_at)

    def write(
        self, version: Version, groups: Sequence[Group], logprobs: Sequence[Array] = ()
    ) -> list[dict[str, Any]]:
        """The rows. groups: of those that `version` was trained on · logprobs: the learner's, as `Group.logprobs`"""
        rows = []
        for number, group in enumerate(groups[:GROUPS]):
            images = self._saved_images(group.task)
            ends = np.cumsum(group.lengths)[:-1]
            every = np.split(logprobs[number], ends) if logprobs else [None] * len(group.lengths)
            for rollout, its in _worst_and_best([*zip(group.rollouts(), every, strict=True)]):
                row = {"version": version, **rollout_row(group.task, rollout, self._text, its)}
                rows.append(row | ({"images": images} if images else {}))
                self._sink.write(rows[-1])
        return rows

    def close(self) -> None:
        self._sink.close()

    def _saved_images(self, task: Task) -> list[str]:
        """The images of a prompt as files of the run folder, each once; a path among them stays as it is."""
        names = []
        for image in [] if isinstance(task.prompt, str) else images_in(task.prompt):
            if not isinstance(image, bytes):
                names.append(str(image))
                continue
            name = f"{IMAGES}/{hashlib.blake2b(image, digest_size=12).hexdigest()}{_suffix(image)}"
            path = self._folder / name
            if not path.exists():
                with writing(path):
                    path.parent.mkdir(exist_ok=True)
                    path.write_bytes(image)
            names.append(name)
        return names


def due(version: Version, config: Config) -> bool:
    """Whether rollouts of this version are written."""
    every = config.telemetry.rollouts_every
    return every > 0 and (version == 1 or version % every == 0)


class TokenText:
    """The text of token ids, special tokens too; the ids themselves where the tokenizer is not at hand."""

    def __init__(self, config: Config) -> None:
        self._tokenizer: Any = None
        with suppress(ConfigError):
            self._tokenizer = load_tokenizer(config.model)

    def of(self, ids: Array) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, ids.tolist()))
        return str(self._tokenizer.decode(ids))

    def of_each(self, ids: Array) -> list[str]:
        """The text that each token adds; that of a character in several tokens stands at the last of them."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return [self.of(ids[i : i + 1]) + ("" if self._tokenizer else " ") for i in range(len(ids))]
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(backend, int(one)) or "" for one in ids]


def rollout_row(
    task: Task, rollout: Rollout, text: TokenText, learner_logprobs: Array | None = None
) -> dict[str, Any]:
    """The row of one rollout.

    prompt, answer  the text before the policy's first token, and all text from there on, also of tools; of the first
                    segment
    tokens          number of the policy's tokens
    versions        the oldest and the newest policy that made one
    """
    mine = rollout.loss_mask != 0
    versions = rollout.versions[mine]
    first, its = rollout.segment_tokens()[0]
    begin = _first(its)
    return {
        "ordinal": task.ordinal,
        "prompt": text.of(first[:begin]),
        "answer": text.of(first[begin:]),
        "reward": float(rollout.reward),
        "parts": {name: float(value) for name, value in rollout.reward_parts.items()},
        "tokens": int(mine.sum()),
        "versions": [int(versions.min()), int(versions.max())] if len(versions) else [],
        "finish": rollout.finish,
        "segments": [*_segments(rollout, text, learner_logprobs)],
    }


def _segments(rollout: Rollout, text: TokenText, learner_logprobs: Array | None) -> Iterator[list[Piece]]:
    start = 0
    for ids, mine in rollout.segment_tokens():
        here = slice(start, start := start + len(ids))
        learner = None if learner_logprobs is None else learner_logprobs[here]
        yield [*_pieces(ids, mine, rollout.versions[here], rollout.logprobs[here], learner, text)]


def _pieces(
    ids: Array, mine: Array, versions: Array, logprobs: Array, learner: Array | None, text: TokenText
) -> Iterator[Piece]:
    """Pieces of one segment, all arrays of its length. Texts joined are the text of the segment."""
    texts, begin, at = text.of_each(ids), _first(mine), 0
    while at < len(ids):
        if mine[at]:
            of_learner = {} if learner is None else {"learner_logprob": round(float(learner[at]), DIGITS)}
            made = {"version": int(versions[at]), "logprob": round(float(logprobs[at]), DIGITS)}
            yield {"text": texts[at], **made, **of_learner}
            at += 1
        else:
            stop = at + _first(mine[at:])
            yield {"text": "".join(texts[at:stop]), "by": "prompt" if at < begin else "environment"}
            at = stop


def _first(mine: Array) -> int:
    """Where the policy's first token is; the end for none."""
    return int(np.argmax(mine)) if mine.any() else len(mine)


def _worst_and_best(rollouts: list[tuple[Rollout, Any]]) -> Iterator[tuple[Rollout, Any]]:
    """Two of a group; one where all rewards are equal."""
    by_reward = sorted(rollouts, key=lambda pair: pair[0].reward)
    yield by_reward[0]
    if by_reward[-1][0].reward > by_reward[0][0].reward:
        yield by_reward[-1]


def _suffix(image: bytes) -> str:
    """
    >>> _suffix(b"\\x89PNG....")
    '.png'
    """
    return ".png" if image.startswith(b"\x89PNG") else ".jpg" if image.startswith(b"\xff\xd8") else ".bin"
