"""Continuous batching on a static KV cache: requests join and leave the batch between decode steps.

            add                 step                                        step
  request ──────▸ waiting ──┬──────────▸ prefill: its prompt once, for ───┬───────▸ one token for every row
                            │            the rows it gets, one token each │         finished rows leave
              waits for free rows,                                  flip between two steps
              lowest ordinal first                                  recompute: prefill of all rows

A request takes the rows that are free; its other samples follow one by one. They find the prompt's keys and values in
a sibling's row, unless weights have changed since: then the prompt is run again.

Rows are kept compact (the last rows move into the holes), so that a step costs what is running and no more.
At fixed shape no row ever moves and every forward is [all rows] x [all columns]: prompts go in token by token
like everything else, and the row of a sample is a function of its ordinal and index. A sample's arithmetic is
then the same whatever else runs, to the last bit. What a flip makes a row forget goes in again in the same way.

Axes:  R rows of the cache · A rows in use (all R at fixed shape) · C columns, prompt + output tokens
       P texts of a prefill · S rows that it fills
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.counter_rng import stream_key, uniform_at
from asyncrl.errors import WeightSyncError
from asyncrl.generator.engines.engine import SampleRequest, check_fits
from asyncrl.generator.engines.transformers.kv_cache import Decode, KVCache, Prefill, attending
from asyncrl.generator.engines.transformers.sampling import Support, draw
from asyncrl.types import Array, Finish, Turn, Version

PREFILL_TOKENS = 8192
"""Most tokens of one prefill, beyond the first text: bounds its memory, and the pause of others."""


@dataclass(slots=True)
class _Running:
    """A request in the batch, and what it has so far."""

    request: SampleRequest
    joined: int = 0  # samples that have or had a row
    turns: dict[int, Turn] = field(default_factory=dict)

    @property
    def left(self) -> int:
        return self.request.n - self.joined

    @property
    def finished(self) -> bool:
        return len(self.turns) == self.request.n

    def in_order(self) -> list[Turn]:
        return [self.turns[i] for i in range(self.request.n)]


class SlotBatch:
    """The batch, without threads or event loop: `add`, `remove` and `flip` between calls of `step`.

    model   a causal LM loaded with attention ATTENTION
    slots   R: samples decoded at once · max_length: C · end_ids: tokens that end a sample
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        max_length: int,
        end_ids: Sequence[int],
        version: Version,
        fixed_shape: bool = False,
    ) -> None:
        self.model, self.version, self.fixed_shape = model, version, fixed_shape
        self.slots, self.max_length = slots, max_length
        self.tokens_made = 0
        self._device = model.device
        self._end_ids = np.array(sorted(set(end_ids)), np.int64)
        self._cache = KVCache(slots, max_length)
        self._columns = torch.arange(max_length, device=self._device)
        self._rows = torch.arange(slots, device=self._device)
        self._waiting: list[_Running] = []  # by ordinal
        self._owner: list[tuple[_Running, int] | None] = [None] * slots
        self._used = 0
        self._used_R = np.zeros(slots, bool)
        self._cached_R = np.zeros(slots, np.int64)  # tokens in the cache = column of the next one to feed
        self._known_R = np.zeros(
            slots, np.int64
        )  # prompt + output tokens so far = column of the next one to draw
        self._prompt_R = np.zeros(slots, np.int64)  # prompt tokens
        self._limit_R = np.zeros(slots, np.int64)  # columns at which the sample has its last token
        self._temperature_R = np.ones(slots)
        self._support = Support(np.ones(slots), np.zeros(slots, np.int64), np.zeros(slots))
        self._key_R = np.zeros(slots, np.uint64)
        self._token_RC = np.zeros((slots, max_length), np.int64)
        self._logp_RC = np.zeros((slots, max_length), np.float32)
        self._version_RC = np.zeros((slots, max_length), np.int32)
        self._of_row = (
            self._cached_R, self._known_R, self._prompt_R, self._limit_R, self._temperature_R, self._key_R,
            *self._support, self._token_RC, self._logp_RC, self._version_RC,
        )  # fmt: skip

    @property
    def running(self) -> int:
        """Samples being decoded."""
        return self._used

    @property
    def waiting(self) -> int:
        """Samples that have no row yet."""
        return sum(running.left for running in self._waiting)

    @property
    def layers(self) -> int:
        """Layers that have attended through the cache so far."""
        return len(self._cache.layers)

    @property
    def idle(self) -> bool:
        return not self._used and not self._waiting

    def add(self, request: SampleRequest) -> None:
        """Queue a request. Raises as `check_fits` does."""
        check_fits(request, self.slots, self.max_length)
        insort(self._waiting, _Running(request), key=lambda running: running.request.ordinal)

    @torch.inference_mode()
    def remove(self, request_id: str) -> list[Turn] | None:
        """Take a request out: its turns, unfinished ones with finish "abort". None if it is not here."""
        rows = {row: self._running_in(row) for row in self._used_rows()}
        everybody = [*self._waiting, *rows.values()]
        running = next((one for one in everybody if one.request.request_id == request_id), None)
        if running is None:
            return None
        if running.left:
            self._waiting.remove(running)
        its_rows = [row for row, of in rows.items() if of is running]
        self._leave(np.array(its_rows, np.int64), ["abort"] * len(its_rows))
        empty = np.zeros(0)
        nothing = self._turn(running.request.prompt_ids, empty, empty, empty, "abort")
        return [running.turns.get(sample, nothing) for sample in range(running.request.n)]

    @torch.inference_mode()
    def flip(
        self,
        staged: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
        version: Version,
        recompute: bool = False,
    ) -> None:
        """Copy `staged` over the live parameters. Samples in flight go on with the keys and values that they have.

        recompute: with those that the new weights make of their prompt and tokens so far. A sample that has no token
        yet, as there are at fixed shape, gets these in any case: all of its tokens will be of `version`.
        """
        torch._foreach_copy_(list(targets.values()), [staged[name] for name in targets])
        self.version = version
        forget_R = self._used_R & (recompute | (self._known_R == self._prompt_R))
        if self.fixed_shape:
            self._cached_R[forget_R] = 0
        else:
            self._recompute(np.flatnonzero(forget_R))

    @torch.inference_mode()
    def step(self, admit: bool = True) -> list[tuple[str, list[Turn]]]:
        """Admit what fits, then make one token for every row. Returns the requests that finished, by id.

        admit: else no sample begins. Raises WeightSyncError if the policy's logits are not finite.
        """
        if self.fixed_shape:
            if admit:
                self._admit_fixed()
            return self._decode(self.slots) if self._used else []
        finished = self._prefill(self._admit()) if admit else []
        return finished + (self._decode(self._used) if self._used else [])

    # ---- joining

    def _admit(self) -> list[tuple[_Running, Array]]:
        """Fill the free rows. Returns the requests whose prompt has to be run, and for which rows."""
        to_run: list[tuple[_Running, Array]] = []
        tokens = 0
        while self._waiting and self._used < self.slots:
            running = self._waiting[0]
            prompt = len(running.request.prompt_ids)
            rows = np.arange(self._used, min(self.slots, self._used + running.left))
            sibling = self._sibling(running)
            if sibling is None:
                tokens += prompt
                if to_run and tokens > PREFILL_TOKENS:
                    break
                self._join(running, rows, cached=prompt)
                to_run.append((running, rows))
            else:
                # All but the prompt's last token, which the row feeds as it feeds any other.
                source = self._tensor(np.full(len(rows), sibling))
                self._cache.move_rows(source, self._tensor(rows), prompt - 1)
                self._join(running, rows, cached=prompt - 1)
            if not running.left:
                self._waiting.pop(0)
        return to_run

    def _sibling(self, running: _Running) -> int | None:
        """A row with the prompt of this request, its keys and values made by the weights of now."""
        prompt = len(running.request.prompt_ids)
        for row in self._used_rows() if running.joined else ():
            begun = self._running_in(row) is running and self._cached_R[row] >= prompt
            if begun and self._version_RC[row, prompt] == self.version:
                return row
        return None

    def _admit_fixed(self) -> None:
        """Each request whose own rows are free; others wait for exactly theirs."""
        still_waiting: list[_Running] = []
        for running in self._waiting:
            request = running.request
            first = request.ordinal * request.n if request.place is None else request.place
            rows = (first + np.arange(request.n)) % self.slots
            if self._used_R[rows].any():
                still_waiting.append(running)
            else:
                self._join(running, rows, cached=0)
        self._waiting = still_waiting

    def _join(self, running: _Running, rows: Array, cached: int) -> None:
        """The next samples of a request, one a row."""
        request, sample_A = running.request, running.joined + np.arange(len(rows))
        prompt = len(request.prompt_ids)
        for sample, row in zip(sample_A, rows, strict=True):
            self._owner[row] = (running, int(sample))
        running.joined += len(rows)
        self._used_R[rows] = True
        self._used += len(rows)
        self._cached_R[rows] = cached
        self._known_R[rows] = self._prompt_R[rows] = prompt
        self._limit_R[rows] = min(prompt + request.sampling.max_tokens, self.max_length)
        self._temperature_R[rows] = request.sampling.temperature
        self._support.top_p_R[rows] = request.sampling.top_p
        self._support.top_k_R[rows] = request.sampling.top_k
        self._support.min_p_R[rows] = request.sampling.min_p
        self._key_R[rows] = stream_key(request.sampling.seed, request.ordinal, sample_A)
        self._token_RC[rows, :prompt] = request.prompt_ids

    def _prefill(self, to_run: list[tuple[_Running, Array]]) -> list[tuple[str, list[Turn]]]:
        if not to_run:
            return []
        rows_P = [rows for _, rows in to_run]
        logits_SV = self._fill([running.request.prompt_ids for running, _ in to_run], rows_P)
        return self._accept(np.concatenate(rows_P), logits_SV)

    def _recompute(self, rows: Array) -> None:
        """Make the keys and values of these rows again, those of about the same length together."""
        left = rows[np.argsort(self._cached_R[rows])]
        while left.size:
            together = max(1, PREFILL_TOKENS // int(self._cached_R[left[-1]]))
            now, left = left[-together:], left[:-together]
            self._fill([self._token_RC[row, : self._cached_R[row]] for row in now], now[:, None])

    def _fill(self, texts: Sequence[Array], rows_P: Sequence[Array] | Array) -> Tensor:
        """Run the texts, and store the keys and values of each in its rows. Logits of what follows, [S, V]."""
        lengths_P = np.array([len(text) for text in texts])
        text_S = np.repeat(np.arange(len(texts)), [len(rows) for rows in rows_P])
        ends_P = np.cumsum(lengths_P)
        columns_T = np.arange(lengths_P.max())
        index_PT = (ends_P - lengths_P)[:, None] + np.minimum(columns_T, lengths_P[:, None] - 1)
        text_N = np.repeat(np.arange(len(texts)), lengths_P)
        column_N = np.arange(ends_P[-1]) - (ends_P - lengths_P)[text_N]
        row_S = np.concatenate(rows_P)
        of = Prefill(*(self._tensor(x) for x in (index_PT, text_N, column_N, row_S, text_S)))
        logits_PV = self._forward(np.concatenate(texts), column_N, of, keep=self._tensor(ends_P - 1))
        return logits_PV[of.prompt_S]

    # ---- stepping

    def _decode(self, rows: int) -> list[tuple[str, list[Turn]]]:
        row_A = np.arange(rows)
        column_A = np.where(self._used_R[:rows], self._cached_R[:rows], 0)
        columns = self.max_length if self.fixed_shape else int(column_A.max()) + 1
        position_A = self._tensor(column_A)
        of = Decode(self._rows[:rows], position_A, self._columns[:columns] > position_A[:, None])
        logits_AV = self._forward(self._token_RC[row_A, column_A], column_A, of, keep=None)
        self._cached_R[:rows] += 1
        if not self.fixed_shape:
            return self._accept(row_A, logits_AV)
        all_in_A = self._used_R & (self._cached_R == self._known_R)
        return self._accept(np.flatnonzero(all_in_A), logits_AV[torch.from_numpy(all_in_A)])

    def _forward(
        self, token_N: Array, position_N: Array, of: Prefill | Decode, keep: Tensor | None
    ) -> Tensor:
        """Logits of the tokens `keep` (all by default) of one packed row."""
        with attending(self._cache, of):
            out = self.model(
                input_ids=self._tensor(token_N)[None],
                position_ids=self._tensor(position_N)[None],
                use_cache=False,
                logits_to_keep=0 if keep is None else keep,
            )
        return out.logits[0]

    def _accept(self, row_A: Array, logits_AV: Tensor) -> list[tuple[str, list[Turn]]]:
        """Draw the next token of these rows; rows that are done leave."""
        if not row_A.size:
            return []
        column_A = self._known_R[row_A]
        uniform_A = uniform_at(self._key_R[row_A], column_A - self._prompt_R[row_A])
        try:
            support = Support(*(of_R[row_A] for of_R in self._support))
            token_A, logp_A = draw(logits_AV, self._temperature_R[row_A], uniform_A, support)
        except FloatingPointError as error:
            raise WeightSyncError(f"version {self.version} cannot be sampled from: {error}") from error
        self._token_RC[row_A, column_A] = token_A
        self._logp_RC[row_A, column_A] = logp_A
        self._version_RC[row_A, column_A] = self.version
        self._known_R[row_A] += 1
        self.tokens_made += len(row_A)
        stopped_A = (token_A[:, None] == self._end_ids).any(1)
        done_A = stopped_A | (column_A + 1 >= self._limit_R[row_A])
        if not done_A.any():
            return []
        finish: list[Finish] = ["stop" if stopped else "length" for stopped in stopped_A[done_A]]
        left = self._leave(row_A[done_A], finish)
        return [(running.request.request_id, running.in_order()) for running in left if running.finished]

    # ---- leaving

    def _leave(self, rows: Array, finish: Sequence[Finish]) -> list[_Running]:
        """Cut the turns of these rows out and free the rows. Returns their requests, each once."""
        left: dict[int, _Running] = {}
        for row, why in zip(rows, finish, strict=True):
            running, sample = self._owner[row]
            made = slice(self._prompt_R[row], self._known_R[row])
            running.turns[sample] = self._turn(
                running.request.prompt_ids,
                self._token_RC[row, made],
                self._logp_RC[row, made],
                self._version_RC[row, made],
                why,
            )
            left[id(running)] = running
            self._owner[row] = None
        self._used_R[rows] = False
        self._used -= len(rows)
        if not self.fixed_shape:
            self._compact(self._used + len(rows))
        return list(left.values())

    def _compact(self, used_before: int) -> None:
        """Move the last rows into the holes, so that the rows in use are 0..used-1 again."""
        kept = self._used_R[:used_before]
        holes = np.flatnonzero(~kept[: self._used])
        if not holes.size:
            return
        last = self._used + np.flatnonzero(kept[self._used :])
        columns = int(self._cached_R[last].max())
        self._cache.move_rows(self._tensor(last), self._tensor(holes), columns)
        for state in self._of_row:
            state[holes] = state[last]
        for hole, row in zip(holes, last, strict=True):
            self._owner[hole], self._owner[row] = self._owner[row], None
        self._used_R[holes], self._used_R[last] = True, False

    def _running_in(self, row: int) -> _Running:
        owner = self._owner[row]
        assert owner is not None, "a row in use has an owner"
        return owner[0]

    def _used_rows(self) -> list[int]:
        return [int(row) for row in np.flatnonzero(self._used_R)]

    def _turn(self, prompt: Array, tokens: Array, logp: Array, versions: Array, finish: Finish) -> Turn:
        return Turn(
            prompt_ids=np.asarray(prompt, np.int64),
            output_ids=tokens.astype(np.int64),
            logprobs=logp.astype(np.float32),
            versions=versions.astype(np.int32),
            finish=finish,
        )

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
