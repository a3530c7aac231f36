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
(F + T) / E as long as p (F + T) > E. Probabilities are measured, by how many tokens matched.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.generator.engines.transformers.rows import BatchedRequest, BatchRows
from asyncrl.generator.engines.transformers.suffix_automaton import ROOT, Likely, SuffixAutomaton
from asyncrl.types import Array

REMEMBERED = 16
"""Answers of one task that are kept, the latest."""

HISTORY_TOKENS = 4_000_000
"""In all sequences that are kept, 4 bytes each. The tasks that were not seen for longest go first."""

READ_TOKENS = 4096
"""Most tokens that automata read between two steps, some microseconds each."""

ORDINALS = 4096
"""Whose tasks are known: between two turns of a conversation the engine has nothing of it."""

BUCKETS = 7
"""Of matched tokens."""

FORGET = 0.999
"""Weight of measured probabilities from one step to the next."""


class AcceptanceRates:
    """How often drafts were accepted, by the number of tokens that had matched: 1, 2-3, 4-7, …, from 64 on.

    >>> rates = AcceptanceRates()
    >>> rates.observe(5, accepted=True)
    >>> round(rates.of(4), 3), rates.of(1)
    (0.667, 0.5)
    """

    def __init__(self) -> None:
        self._accepted, self._tried = [0.0] * BUCKETS, [0.0] * BUCKETS

    def of(self, matched: int) -> float:
        """The probability that a draft behind so many matching tokens is accepted; one half if nothing is known."""
        at = min(matched.bit_length(), BUCKETS) - 1
        return (self._accepted[at] + 1) / (self._tried[at] + 2)

    def observe(self, matched: int, accepted: bool) -> None:
        at = min(matched.bit_length(), BUCKETS) - 1
        self._tried[at] += 1
        self._accepted[at] += accepted

    def forget(self) -> None:
        """A step is over."""
        self._accepted = [FORGET * count for count in self._accepted]
        self._tried = [FORGET * count for count in self._tried]


@dataclass(slots=True)
class _Task:
    """A task that has samples in flight. unread: what its automaton has not read: the state of what stands before, and
    the tokens"""

    name: bytes
    unread: deque[tuple[int, Array]]
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    samples: int = 0


@dataclass(slots=True)
class _Sample:
    """A sample in flight. state: of the tokens that its task's automaton has read"""

    task: _Task
    state: int = ROOT
    read: int = 0


class Drafter:
    """Drafts for the rows of a batch.

    tokens: most drafts of one row and step · ridge_tokens: with so many a forward takes twice as long as with one; with
    more rows than that nothing is drafted
    """

    def __init__(self, tokens: int, ridge_tokens: int) -> None:
        self.drafted = self.accepted = 0
        self._most, self._ridge = tokens, ridge_tokens
        self._rates = AcceptanceRates()
        self._tasks: dict[bytes, _Task] = {}
        self._samples: dict[tuple[str, int], _Sample] = {}
        self._history: OrderedDict[bytes, deque[Array]] = OrderedDict()
        self._remembered = 0  # tokens
        self._names: OrderedDict[int, bytes] = OrderedDict()
        self._likely: dict[int, list[Likely]] = {}

    def draft(self, rows: BatchRows) -> Array:
        """Write drafts behind the known tokens of rows in use. Their numbers, [A]."""
        count_A = np.zeros(rows.used, np.int64)
        if rows.used > self._ridge:
            return count_A
        self._rates.forget()
        self._likely = self._look_up(rows)
        for row in self._worthwhile(rows.used):
            count_A[row] += 1
        for row in np.flatnonzero(count_A):
            known, count = rows.known_R[row], count_A[row]
            rows.token_RC[row, known : known + count] = [each.token for each in self._likely[row][:count]]
        return count_A

    def learn(self, count_A: Array, accepted_A: Array) -> None:
        """count_A: drafts of each row · accepted_A: those of them that were accepted"""
        for row in np.flatnonzero(count_A):
            count, accepted = int(count_A[row]), int(accepted_A[row])
            for at, draft in enumerate(self._likely[row][: min(count, accepted + 1)]):
                self._rates.observe(draft.matched, at < accepted)
            self.drafted += count
            self.accepted += accepted

    def end(self, batched: BatchedRequest, index: int, sequence: Array) -> None:
        """A sample left its row. sequence: its prompt and answer"""
        sample = self._samples.pop((batched.request.request_id, index), None)
        name = self._name(batched.request) if sample is None else sample.task.name
        sequence = sequence.astype(np.int32)
        self._remember(name, sequence)
        if task := self._tasks.get(name):
            task.unread.append(
                (ROOT, sequence) if sample is None else (sample.state, sequence[sample.read :])
            )
            task.samples -= sample is not None
            if not task.samples:
                del self._tasks[name]

    def _look_up(self, rows: BatchRows) -> dict[int, list[Likely]]:
        """Tokens that are likely next in each row, as far as the automata have read the row."""
        found: dict[int, list[Likely]] = {}
        left = READ_TOKENS
        for row in range(rows.used):
            known = int(rows.known_R[row])
            sample = self._sample(*rows.owner(row))
            task, unread = sample.task, sample.task.unread
            while unread and left > 0:
                state, tokens = unread.popleft()
                now, later = tokens[:left], tokens[left:]
                state, left = _read(task.automaton, state, now), left - len(now)
                if len(later):
                    unread.appendleft((state, later))
            now = rows.token_RC[row, sample.read : known][: max(0, left)]
            sample.state, left = _read(task.automaton, sample.state, now), left - len(now)
            sample.read += len(now)
            if sample.read == known:
                most = min(self._most, int(rows.limit_R[row]) - known - 1)
                found[row] = task.automaton.continuation(sample.state, most)
        return found

    def _worthwhile(self, used: int) -> Iterator[int]:
        """The rows of the drafts that make a step's tokens cheaper, the likeliest first."""
        most_tokens = used * (1 + self._most)
        candidates: list[tuple[float, int]] = []
        for row, likely in self._likely.items():
            accepted = 1.0
            for draft in likely:
                accepted *= self._rates.of(draft.matched)
                if accepted * (self._ridge + most_tokens) <= used:
                    break
                candidates.append((accepted, row))
        tokens, expected = used, float(used)
        for accepted, row in sorted(candidates, reverse=True):
            if accepted * (self._ridge + tokens) <= expected:
                break
            tokens, expected = tokens + 1, expected + accepted
            yield row

    def _sample(self, batched: BatchedRequest, index: int) -> _Sample:
        key = batched.request.request_id, index
        if key not in self._samples:
            name = self._name(batched.request)
            if name not in self._tasks:
                self._tasks[name] = _Task(name, deque((ROOT, one) for one in self._history.get(name, ())))
            self._samples[key] = _Sample(self._tasks[name])
            self._tasks[name].samples += 1
        return self._samples[key]

    def _name(self, request: SampleRequest) -> bytes:
        """Of a request's task: the prompt of its first turn, with which those of later turns of its ordinal begin."""
        prompt = np.asarray(request.prompt_ids, np.int64)[: len(request.prompt_ids) - request.made].tobytes()
        name = self._names.get(request.ordinal)
        if name is None or not prompt.startswith(name):
            name = self._names[request.ordinal] = prompt
            if len(self._names) > ORDINALS:
                self._names.popitem(last=False)
        return name

    def _remember(self, name: bytes, sequence: Array) -> None:
        kept = self._history.setdefault(name, deque())
        self._history.move_to_end(name)
        kept.append(sequence)
        self._remembered += len(sequence)
        if len(kept) > REMEMBERED:
            self._remembered -= len(kept.popleft())
        while self._remembered > HISTORY_TOKENS and len(self._history) > 1:
            _, forgotten = self._history.popitem(last=False)
            self._remembered -= sum(map(len, forgotten))


def _read(automaton: SuffixAutomaton, state: int, tokens: Array) -> int:
    """The state behind these tokens."""
    for token in tokens.tolist():
        state = automaton.extend(state, token)
    return state
