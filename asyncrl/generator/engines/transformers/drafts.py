"""Speculative decoding without a second model: tokens are drafted from other answers to the same prompt, and drawn by
the policy as ever (arXiv:2511.13841, whose drafts come from suffix trees of a problem's rollouts).

    answers to the prompt, earlier ones ──▸ SuffixAutomaton ──▸ drafts of a row     "… = 4|2|<end>"
    those under way, and the prompt ──────▸                          │
                                                                     ▾
    one forward of the row's last token and its drafts ──▸ draws ──▸ accepted up to the first that is not the draft

A token's draw depends on (seed, ordinal, sample, position) and on the logits behind the tokens before it, never on a
draft: a sample is the same with drafts and without, but for the rounding of forwards of other shapes. A draft is
accepted with the policy's probability of it, as by rejection sampling (arXiv:2211.17192, for drafts that are certain).

A forward has the drafts that make the step's tokens cheapest. With T tokens it takes a time of about F + T, in tokens,
where F is `ridge_tokens`, and it is expected to make E tokens. A draft that is accepted with probability p lowers
(F + T) / E as long as p (F + T) > E. Probabilities are measured, by how often the token had come behind the same ones.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.generator.engines.transformers.rows import BatchedRequest, BatchRows
from asyncrl.generator.engines.transformers.suffix_automaton import ROOT, SuffixAutomaton
from asyncrl.types import Array

REMEMBERED = 16
"""Sequences of one task that are kept, the latest; none that another one begins with."""

HISTORY_TOKENS = 16_000_000
"""In all sequences that are kept, 4 bytes each. The tasks that were not seen for longest go first."""

STATES = 1_000_000
"""Most states of all automata, about 100 bytes each; those of samples in flight stay beyond it. One that has as many by
itself is begun anew."""

READ_TOKENS = 512
"""Most tokens that automata read between two steps, in about 5 ms."""

ORDINALS, PROMPTS = 4096, 4
"""Whose tasks are known, the latest, and prompts of each: evaluations and probes count from 0 too."""

BUCKETS = 8
"""Of shares, equally wide."""

FORGET = 0.999
"""Weight of measured probabilities from one step to the next."""


class AcceptanceRates:
    """The rates at which drafts were accepted, by their `Likely.share`, which counts as two observations.

    >>> rates = AcceptanceRates()
    >>> rates.observe(0.5, accepted=True)
    >>> round(rates.of(0.5), 3), rates.of(0.25)
    (0.667, 0.25)
    """

    def __init__(self) -> None:
        self._accepted, self._tried = [0.0] * BUCKETS, [0.0] * BUCKETS

    def of(self, share: float) -> float:
        """The probability that a draft of this share is accepted."""
        at = int(share * BUCKETS)
        return (self._accepted[at] + 2 * share) / (self._tried[at] + 2)

    def observe(self, share: float, accepted: bool) -> None:
        at = int(share * BUCKETS)
        self._tried[at] += 1
        self._accepted[at] += accepted

    def forget(self) -> None:
        """Let what was observed so far count for a little less."""
        self._accepted = [FORGET * count for count in self._accepted]
        self._tried = [FORGET * count for count in self._tried]


class Draft(NamedTuple):
    """share: as of `Likely` · accepted: the probability that the policy draws it, and all drafts before it"""

    token: int
    share: float
    accepted: float


@dataclass(slots=True)
class _Task:
    """A task's automaton. unread: pairs of a state and the tokens to read behind it · samples: those in flight"""

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    unread: deque[tuple[int, Array]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    samples: int = 0

    def read(self, most: int) -> int:
        """Read what is unread, `most` tokens of it. Returns how many they were."""
        done = 0
        while self.unread and done < most:
            state, tokens = self.unread.popleft()
            now, later = tokens[: most - done], tokens[most - done :]
            state = self.read_on(state, now)
            done += len(now)
            if len(later):
                self.unread.appendleft((state, later))
        return done

    def read_on(self, state: int, tokens: Array) -> int:
        """The state behind these tokens."""
        for token in tokens.tolist():
            state = self.automaton.extend(state, token)
        return state


@dataclass(slots=True)
class _Sample:
    """A sample in flight. state: behind the tokens that are read, `read` of them"""

    name: bytes
    task: _Task
    state: int = ROOT
    read: int = 0


class Drafter:
    """Drafts for the rows of a batch.

    tokens: most drafts of one row and step · ridge_tokens: with so many a forward takes twice as long as with one; with
    more rows than that nothing is drafted. A step has at most twice as many tokens, or as many as the batch has rows
    """

    def __init__(self, tokens: int, ridge_tokens: int) -> None:
        self.drafted = self.accepted = 0
        self._most, self._ridge = tokens, ridge_tokens
        self._rates = AcceptanceRates()
        self._tasks: OrderedDict[bytes, _Task] = OrderedDict()
        self._states = 0  # of all automata
        self._samples: dict[tuple[str, int], _Sample] = {}
        self._history: OrderedDict[bytes, deque[Array]] = OrderedDict()
        self._remembered = 0  # tokens
        self._names: OrderedDict[int, deque[tuple[int, bytes]]] = OrderedDict()
        self._likely: list[list[Draft]] = []  # by row

    def draft(self, rows: BatchRows, end_ids: Array) -> Array:
        """Write drafts behind the known tokens of rows in use, none behind one of `end_ids`. Their numbers, [A]."""
        count_A = np.zeros(rows.used, np.int64)
        if rows.used > self._ridge:
            return count_A
        self._rates.forget()
        self._read(rows)
        most_tokens = max(len(rows.used_R), 2 * self._ridge)
        least, ends = rows.used / (self._ridge + most_tokens), {*end_ids.tolist()}
        self._likely = [self._look_up(rows, row, least, ends) for row in range(rows.used)]
        for row in self._worthwhile(rows.used, most_tokens):
            count_A[row] += 1
        for row in np.flatnonzero(count_A).tolist():
            known, count = rows.known_R[row], count_A[row]
            rows.token_RC[row, known : known + count] = [each.token for each in self._likely[row][:count]]
        return count_A

    def learn(self, count_A: Array, accepted_A: Array) -> None:
        """count_A: drafts of each row · accepted_A: those of them that stand in its sample"""
        for row in np.flatnonzero(count_A):
            count, accepted = int(count_A[row]), int(accepted_A[row])
            for at, draft in enumerate(self._likely[row][: min(count, accepted + 1)]):
                self._rates.observe(draft.share, at < accepted)
            self.drafted += count
            self.accepted += accepted

    def end(self, batched: BatchedRequest, index: int, sequence: Array) -> None:
        """A sample left its row. sequence: its prompt and answer"""
        sample = self._samples.pop((batched.request.request_id, index), None)
        name = self._name(batched.request) if sample is None else sample.name
        sequence = sequence.astype(np.int32)
        self._remember(name, sequence)
        if sample is not None:
            sample.task.unread.append((sample.state, sequence[sample.read :]))
            sample.task.samples -= 1
        elif name in self._tasks:
            self._tasks[name].unread.append((ROOT, sequence))

    def _read(self, rows: BatchRows) -> None:
        """Let the automata read on, the rows in use after what is known of their tasks."""
        left = READ_TOKENS
        for row in range(rows.used):
            sample = self._sample(*rows.owner(row))
            states = len(sample.task.automaton)
            left -= sample.task.read(left)
            new = rows.token_RC[row, sample.read : rows.known_R[row]][:left]
            sample.state = sample.task.read_on(sample.state, new)
            sample.read, left = sample.read + len(new), left - len(new)
            self._states += len(sample.task.automaton) - states
        if self._states > STATES:
            self._forget_tasks()

    def _look_up(self, rows: BatchRows, row: int, least: float, ends: set[int]) -> list[Draft]:
        """Drafts of a row that are accepted with more than `least`, if its automaton has read all of it."""
        sample, known = self._sample(*rows.owner(row)), int(rows.known_R[row])
        if sample.read < known:
            return []
        most = max(0, min(self._most, int(rows.limit_R[row]) - known - 1))
        found, accepted = list[Draft](), 1.0
        for token, share in islice(sample.task.automaton.continuation(sample.state), most):
            accepted *= self._rates.of(share)
            if accepted <= least:
                break
            found.append(Draft(token, share, accepted))
            if token in ends:
                break
        return found

    def _worthwhile(self, used: int, most_tokens: int) -> Iterator[int]:
        """The rows of the drafts that make a step's tokens cheaper, the likeliest first."""
        candidates = [(draft.accepted, row) for row, likely in enumerate(self._likely) for draft in likely]
        tokens, expected = used, float(used)
        for accepted, row in sorted(candidates, reverse=True):
            if tokens == most_tokens or accepted * (self._ridge + tokens) <= expected:
                break
            tokens, expected = tokens + 1, expected + accepted
            yield row

    def _sample(self, batched: BatchedRequest, index: int) -> _Sample:
        """A sample in flight, whose task has an automaton from now on."""
        key = batched.request.request_id, index
        if key not in self._samples:
            name = self._name(batched.request)
            if name not in self._tasks:
                self._tasks[name] = _Task()
                self._states += 1
                self._tasks[name].unread.extend((ROOT, one) for one in self._history.get(name, ()))
            self._tasks.move_to_end(name)
            self._tasks[name].samples += 1
            self._samples[key] = _Sample(name, self._tasks[name])
        return self._samples[key]

    def _forget_tasks(self) -> None:
        """Those that have no samples in flight, and one that is too large alone."""
        for name, task in [*self._tasks.items()]:
            too_large = len(task.automaton) > STATES
            if too_large or (self._states > STATES and not task.samples):
                self._states -= len(self._tasks.pop(name).automaton)
            if too_large:
                self._samples = {key: sample for key, sample in self._samples.items() if sample.name != name}

    def _name(self, request: SampleRequest) -> bytes:
        """The name of a request's task: a hash of its first turn's prompt, with which those of later turns begin."""
        prompt = np.asarray(request.prompt_ids, np.int32)[: len(request.prompt_ids) - request.made]
        known = self._names.setdefault(request.ordinal, deque(maxlen=PROMPTS))
        self._names.move_to_end(request.ordinal)
        if len(self._names) > ORDINALS:
            self._names.popitem(last=False)
        for length, name in sorted(known, reverse=True):
            if length <= len(prompt) and _hashed(prompt[:length]) == name:
                return name
        known.append((len(prompt), _hashed(prompt)))
        return known[-1][1]

    def _remember(self, name: bytes, sequence: Array) -> None:
        before = self._history.pop(name, ())
        kept = deque((one for one in before if not np.array_equal(one, sequence[: len(one)])), REMEMBERED)
        kept.append(sequence)
        self._history[name] = kept
        self._remembered += sum(map(len, kept)) - sum(map(len, before))
        while self._remembered > HISTORY_TOKENS and len(self._history) > 1:
            _, forgotten = self._history.popitem(last=False)
            self._remembered -= sum(map(len, forgotten))


def _hashed(tokens: Array) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
