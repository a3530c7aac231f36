"""Continuous batching on a static KV cache: requests join and leave the batch between decode steps.

            add                 step                                        step
  request ──────▸ waiting ──┬──────────▸ prefill: its prompt once, for ───┬───────▸ one token for every row
                            │            the rows it gets, one token each │         finished rows leave
              waits for free rows,                                  flip between two steps
              lowest ordinal first                                  recompute: prefill of all rows

A request takes the free rows; its other samples follow one by one. They copy the prompt's keys and values from a
sibling's row, unless weights have changed since or layers have a recurrent state: then the prompt runs again.

Rows are kept compact (the last rows move into the holes), so that a step costs no more than the running samples.
At fixed shape no row ever moves and every forward is [all rows] x [all columns]: prompts go in token by token
like everything else, and the row of a sample is a function of its ordinal and index. A sample's arithmetic is
then the same whatever else runs, to the last bit. If a flip invalidates a row's cache, its tokens are fed again one by
one.

With a drafter a step may make several tokens of a row: see `drafts.py`.

Axes:  R rows of the cache · A rows in use (all R at fixed shape) · C columns, prompt + output tokens
       N tokens of a forward · T most tokens of a row in it · P texts of a prefill · S rows that it fills
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.counter_rng import uniform_at
from asyncrl.device import accelerator
from asyncrl.errors import WeightSyncError
from asyncrl.generator.engines.engine import Pieces, SampleRequest, check_fits
from asyncrl.generator.engines.transformers.drafts import Drafter
from asyncrl.generator.engines.transformers.kv_cache import Decode, Drafts, KVCache, Prefill, attending
from asyncrl.generator.engines.transformers.recurrent_rows import keep_states
from asyncrl.generator.engines.transformers.rows import BatchedRequest, BatchRows, Fed, Support, sample_tokens
from asyncrl.models.loading import delta_nets, text_body
from asyncrl.models.routing import ExpertRecorder
from asyncrl.models.vision import MediaInputs, decoder_inputs, media_inputs
from asyncrl.telemetry.step_times import StepTimes
from asyncrl.types import Array, Finish, Prompt, Turn, Version

PREFILL_TOKENS = 8192
"""Most tokens of one prefill, beyond the first text: bounds its memory, and the pause of other samples."""


class SlotBatch:
    """The batch, without threads or event loop: `add`, `remove` and `flip` between calls of `step`.

    It has more methods than other classes: the parts of a step are methods, because they share the rows and the
    cache.

    model   a causal LM loaded with attention ATTENTION
    slots   R: samples decoded at once · max_length: C · end_ids: tokens that end a sample
    recorder  of the model's layers, for turns that have the experts of their tokens
    drafter   not at fixed shape, nor with layers that have a recurrent state: it has no way back from a draft
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
        recorder: ExpertRecorder | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        if drafter is not None and (fixed_shape or delta_nets(model)):
            raise ValueError("no drafts at fixed shape, nor for layers that have a recurrent state")
        self.drafter = drafter
        self.model, self.version, self.fixed_shape = model, version, fixed_shape
        self.slots, self.max_length = slots, max_length
        self.tokens_made = 0
        self.decode_times, self.prefill_times = StepTimes(), StepTimes()
        # On a CPU the thread's own time: the process's other threads are busiest after steps in which samples end.
        self._clock = time.thread_time if model.device.type == "cpu" else time.perf_counter
        self.device = model.device
        self._end_ids = np.array(sorted(set(end_ids)), np.int64)
        self.cache = KVCache(slots, max_length)
        self._recurrent = keep_states(model)
        self._column_indices = torch.arange(max_length, device=self.device)
        self._row_indices = torch.arange(slots, device=self.device)
        self._waiting: list[BatchedRequest] = []  # by ordinal
        self._recorder = recorder
        self._rows = BatchRows(slots, max_length, recorder.shape.width if recorder else 0)
        self._pieces: list[tuple[Pieces, int, Turn]] = []

    @property
    def running(self) -> int:
        """Samples being decoded."""
        return self._rows.used

    @property
    def waiting(self) -> int:
        """Samples that have no row yet."""
        return sum(batched.left for batched in self._waiting)

    @property
    def idle(self) -> bool:
        return not self._rows.used and not self._waiting

    def tensors(self) -> Iterator[Tensor]:
        """All that the batch has on its device."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from (self._column_indices, self._row_indices)
        yield from self.cache.tensors()

    def take_pieces(self) -> list[tuple[Pieces, int, Turn]]:
        """The pieces of the last step: (the receiver of pieces, sample, turn)."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def add(self, request: SampleRequest) -> None:
        """Queue a request. Raises as `check_fits` does."""
        check_fits(request, self.slots, self.max_length)
        insort(self._waiting, BatchedRequest(request), key=lambda batched: batched.request.ordinal)

    @torch.inference_mode()
    def remove(self, request_id: str) -> list[Turn] | None:
        """Take a request out. Returns its turns, unfinished ones with finish "abort", or None if it is not here."""
        of_row = self._rows.requests()
        everybody = [*self._waiting, *of_row.values()]
        batched = next((one for one in everybody if one.request.request_id == request_id), None)
        if batched is None:
            return None
        if batched.left:
            self._waiting.remove(batched)
        rows = [row for row, owner in of_row.items() if owner is batched]
        self._release(np.array(rows, np.int64), ["abort"] * len(rows))
        return batched.in_order()

    @torch.inference_mode()
    def flip(
        self,
        staged: Mapping[str, Tensor],
        targets: Mapping[str, Tensor],
        version: Version,
        recompute: bool = False,
    ) -> None:
        """Copy `staged` over the live parameters. Samples in flight keep their keys and values.

        recompute: compute them again with the new weights from prompt and tokens so far. A sample that has no token
        yet, as there are at fixed shape, gets new ones in any case: all of its tokens will be of `version`.
        """
        torch._foreach_copy_(list(targets.values()), [staged[name] for name in targets])
        # Staging may now be overwritten, and the live weights hashed, on any stream.
        accelerator.wait_for_stream(self.device)
        self.version, rows = version, self._rows
        unanswered_R = rows.known_R == rows.prompt_R
        rows.routed_R[unanswered_R] = 0
        forget_R = rows.used_R & (recompute | unanswered_R)
        if self.fixed_shape:
            rows.cached_R[forget_R] = 0
        else:
            self._recompute(np.flatnonzero(forget_R))

    @torch.inference_mode()
    def step(self, admit: bool = True) -> list[tuple[str, list[Turn]]]:
        """Admit waiting requests, then make one token for every row. Returns the requests that finished, by id.

        admit: False lets no sample begin. Raises WeightSyncError if the policy's logits are not finite.
        """
        if self.fixed_shape:
            if admit:
                self._admit_fixed()
            return self._timed_decode(self.slots) if self._rows.used else []
        finished = self._timed_prefill() if admit and self._waiting else []
        return finished + (self._timed_decode(self._rows.used) if self._rows.used else [])

    def _timed_decode(self, rows: int) -> list[tuple[str, list[Turn]]]:
        start = self._clock()
        finished = self._decode(rows)
        self.decode_times = self.decode_times.with_step(rows, self._clock() - start)
        return finished

    # ---- joining

    def _timed_prefill(self) -> list[tuple[str, list[Turn]]]:
        start = self._clock()
        to_run = self._admit()
        finished = self._prefill(to_run)
        if rows := sum(len(rows) for _, rows in to_run):
            self.prefill_times = self.prefill_times.with_step(rows, self._clock() - start)
        return finished

    def _admit(self) -> list[tuple[BatchedRequest, Array]]:
        """Fill the free rows. Returns the requests whose prompt has to run, each with its rows."""
        to_run: list[tuple[BatchedRequest, Array]] = []
        tokens = 0
        while self._waiting and self._rows.used < self.slots:
            batched, used = self._waiting[0], self._rows.used
            prompt = len(batched.request.prompt_ids)
            rows = np.arange(used, min(self.slots, used + batched.left))
            sibling = None if self._recurrent else self._rows.sibling(batched, self.version)
            if sibling is None:
                tokens += prompt
                if to_run and tokens > PREFILL_TOKENS:
                    break
                self._rows.assign(batched, rows, cached=prompt)
                to_run.append((batched, rows))
            else:
                # All but the prompt's last token, which the row feeds as it feeds any other.
                source = self._tensor(np.full(len(rows), sibling))
                self.cache.move_rows(source, self._tensor(rows), prompt - 1)
                self._rows.assign(batched, rows, cached=prompt - 1, ahead=int(self._rows.ahead_R[sibling]))
                self._rows.copy_experts(sibling, rows, prompt - 1)
            if not batched.left:
                self._waiting.pop(0)
        return to_run

    def _admit_fixed(self) -> None:
        """Each request whose own rows are free; others wait for exactly theirs."""
        still_waiting: list[BatchedRequest] = []
        for batched in self._waiting:
            request = batched.request
            first = request.ordinal * request.n if request.place is None else request.place
            rows = (first + np.arange(request.n)) % self.slots
            if self._rows.used_R[rows].any():
                still_waiting.append(batched)
            else:
                self._rows.assign(batched, rows, cached=0)
        self._waiting = still_waiting

    def _prefill(self, to_run: list[tuple[BatchedRequest, Array]]) -> list[tuple[str, list[Turn]]]:
        if not to_run:
            return []
        rows_P = [rows for _, rows in to_run]
        requests = [batched.request for batched, _ in to_run]
        logits_SV = self._fill([Prompt(request.prompt_ids, request.media) for request in requests], rows_P)
        return self._accept(np.concatenate(rows_P), logits_SV)

    def _recompute(self, rows: Array) -> None:
        """Make the keys and values of these rows again, those of about the same length together."""
        cached_R = self._rows.cached_R
        left = rows[np.argsort(cached_R[rows])]
        while left.size:
            together = max(1, PREFILL_TOKENS // int(cached_R[left[-1]]))
            now, left = left[-together:], left[:-together]
            media = [self._rows.owner(row)[0].request.media for row in now]
            texts = [
                Prompt(self._rows.token_RC[row, : cached_R[row]], of)
                for row, of in zip(now, media, strict=True)
            ]
            self._fill(texts, now[:, None])

    def _fill(self, texts: Sequence[Prompt], rows_P: Sequence[Array] | Array) -> Tensor:
        """Run the texts, and store the keys and values of each in its rows. Logits of the next tokens, [S, V]."""
        lengths_P = np.array([len(text.ids) for text in texts])
        text_S = np.repeat(np.arange(len(texts)), [len(rows) for rows in rows_P])
        ends_P = np.cumsum(lengths_P)
        columns_T = np.arange(lengths_P.max())
        index_PT = (ends_P - lengths_P)[:, None] + np.minimum(columns_T, lengths_P[:, None] - 1)
        text_N = np.repeat(np.arange(len(texts)), lengths_P)
        column_N = np.arange(ends_P[-1]) - (ends_P - lengths_P)[text_N]
        row_S = np.concatenate(rows_P)
        of = Prefill(*(self._tensor(x) for x in (index_PT, text_N, column_N, row_S, text_S)))
        ids_N, last_P = np.concatenate([text.ids for text in texts]), self._tensor(ends_P - 1)
        if any(text.media for text in texts):
            media = media_inputs(self.model, texts)
            self._rows.ahead_R[row_S] = (media.next_P - lengths_P)[text_S]
            logits_PV = self._forward_media(ids_N, media, of, keep=last_P)
        else:
            logits_PV = self._forward(ids_N, column_N, of, keep=last_P)
        if self._recorder:
            experts_NW = self._recorder.take(len(column_N))
            for rows, end, length in zip(rows_P, ends_P, lengths_P, strict=True):
                for row in rows:
                    at = slice(end - length, end)
                    self._rows.note_experts(np.full(length, row), column_N[at], experts_NW[at])
        return logits_PV[of.prompt_S]

    # ---- stepping

    def _decode(self, count: int) -> list[tuple[str, list[Turn]]]:
        rows = self._rows
        drafts_A = self.drafter.draft(rows, self._end_ids) if self.drafter else np.zeros(count, np.int64)
        fed = rows.fed(drafts_A)
        rotary_N = fed.column_N + rows.ahead_R[fed.row_N]
        logits_NV = self._forward(fed.token_N, rotary_N, self._places(fed), keep=None)
        experts_NW = self._recorder.take(len(fed.row_N)) if self._recorder else None
        if not self.fixed_shape:
            return self._accept_drafts(fed, logits_NV, experts_NW)
        if experts_NW is not None:
            rows.note_experts(fed.row_N, fed.column_N, experts_NW)
        rows.cached_R += 1
        all_in = np.flatnonzero(rows.used_R & (rows.cached_R == rows.known_R))
        return self._accept(all_in, logits_NV[self._tensor(all_in)])

    def _places(self, fed: Fed) -> Decode:
        """Where a decoding forward stores its tokens, and what they see."""
        columns = self.max_length if self.fixed_shape else int(fed.column_N.max()) + 1
        column_L, column_N = self._column_indices[:columns], self._tensor(fed.column_N)
        if not fed.drafts_A.any():
            return Decode(
                self._row_indices[: len(fed.row_N)], column_N, column_L, column_L > column_N[:, None]
            )
        first_A = np.flatnonzero(fed.offset_N == 0)
        first_At = self._tensor(first_A)
        hidden_AL = column_L > column_N[first_At][:, None]
        drafts = (*self._drafts(first_A, fed.drafts_A, column_N, column_L),)
        return Decode(self._tensor(fed.row_N), column_N, column_L, hidden_AL, first_At, drafts)

    def _drafts(
        self, first_A: Array, drafts_A: Array, column_N: Tensor, column_L: Tensor
    ) -> Iterator[Drafts]:
        """Drafts behind the first tokens of rows; none is padded to more than twice as many as its row has."""
        size_A = np.ceil(np.log2(np.maximum(1, drafts_A)))
        for size in np.unique(size_A[drafts_A > 0]):
            row_X = np.flatnonzero((size_A == size) & (drafts_A > 0))
            offset_T, last_X1 = np.arange(drafts_A[row_X].max()), drafts_A[row_X, None] - 1
            index_XT = self._tensor(first_A[row_X, None] + 1 + np.minimum(offset_T, last_X1))
            column_XT = column_N[index_XT]
            yield Drafts(self._tensor(row_X), index_XT, column_XT, column_L > column_XT[:, :, None])

    def _forward(
        self, token_N: Array, position_N: Array, of: Prefill | Decode, keep: Tensor | None
    ) -> Tensor:
        """Logits of the tokens `keep` (all by default) of one packed row."""
        with attending(self.cache, of):
            out = self.model(
                input_ids=self._tensor(token_N)[None],
                position_ids=self._tensor(position_N)[None],
                use_cache=False,
                logits_to_keep=0 if keep is None else keep,
            )
        return out.logits[0]

    def _forward_media(self, token_N: Array, media: MediaInputs, of: Prefill, keep: Tensor) -> Tensor:
        """As `_forward`, where tokens stand for images."""
        places = (tensor.to(self.device) for tensor in (media.at_T, media.row_T))
        with attending(self.cache, of):
            out = text_body(self.model)(
                **decoder_inputs(self.model, self._tensor(token_N)[None], media.items, *places),
                position_ids=media.position_3N[:, None].to(self.device),
                use_cache=False,
            )
        logits: Tensor = self.model.get_output_embeddings()(out.last_hidden_state[0, keep])
        return logits

    def _accept(self, row_A: Array, logits_AV: Tensor) -> list[tuple[str, list[Turn]]]:
        """Draw the next token of these rows; rows that are done leave."""
        if not row_A.size:
            return []
        drawn = self._draw(row_A, self._rows.known_R[row_A], logits_AV)
        return self._leave(self._append(row_A, *drawn))

    def _accept_drafts(
        self, fed: Fed, logits_NV: Tensor, experts_NW: Array | None
    ) -> list[tuple[str, list[Turn]]]:
        """Draw the tokens behind those that were fed, and keep them up to a draft that was wrong, or a row's end."""
        rows, used = self._rows, self._rows.used
        drawn_N, logp_N = self._draw(fed.row_N, fed.column_N + 1, logits_NV)
        made_A = fed.made(drawn_N)
        finish: dict[int, Finish] = {}
        for offset in range(made_A.max()):
            stands_N = (fed.offset_N == offset) & (made_A[fed.row_N] > offset)
            at = np.flatnonzero(stands_N & np.isin(fed.row_N, [*finish], invert=True))
            if experts_NW is not None:
                rows.note_experts(fed.row_N[at], fed.column_N[at], experts_NW[at])
            finish |= self._append(fed.row_N[at], drawn_N[at], logp_N[at])
        if self.drafter:
            accepted_A = rows.known_R[:used] - rows.cached_R[:used] - 2
            self.drafter.learn(fed.drafts_A, accepted_A)
        rows.cached_R[:used] = rows.known_R[:used] - 1
        return self._leave(finish)

    def _draw(self, row_N: Array, column_N: Array, logits_NV: Tensor) -> tuple[Array, Array]:
        """Tokens for these columns of rows, and their log-probs."""
        rows = self._rows
        uniform_N = uniform_at(rows.key_R[row_N], column_N - rows.origin_R[row_N])
        support = Support(*(of_R[row_N] for of_R in rows.support))
        try:
            return sample_tokens(logits_NV, rows.temperature_R[row_N], uniform_N, support)
        except FloatingPointError as error:
            raise WeightSyncError(f"version {self.version} cannot be sampled from: {error}") from error

    def _append(self, row_A: Array, token_A: Array, logp_A: Array) -> dict[int, Finish]:
        """Add a token to each of these rows. Returns why a row is done, of those that are."""
        rows = self._rows
        column_A = rows.known_R[row_A]
        rows.token_RC[row_A, column_A] = token_A
        rows.logp_RC[row_A, column_A] = logp_A
        rows.version_RC[row_A, column_A] = self.version
        rows.known_R[row_A] += 1
        self.tokens_made += len(row_A)
        stopped_A = (token_A[:, None] == self._end_ids).any(1) | rows.at_stop_text(row_A)
        done_A = stopped_A | (column_A + 1 >= rows.limit_R[row_A])
        self._cut_pieces(row_A[~done_A])
        return {
            int(row): "stop" if stopped else "length"
            for row, stopped in zip(row_A[done_A], stopped_A[done_A], strict=True)
        }

    def _leave(self, finish: Mapping[int, Finish]) -> list[tuple[str, list[Turn]]]:
        """Rows that are done leave. Returns the requests that finished, by id."""
        if not finish:
            return []
        ended = [self._rows.owner(row) for row in finish]
        left = self._release(np.array([*finish]), [*finish.values()])
        for batched, sample in ended:
            if batched.request.pieces is not None and not batched.finished:
                self._pieces.append((batched.request.pieces, sample, batched.turns[sample]))
        return [(batched.request.request_id, batched.in_order()) for batched in left if batched.finished]

    def _cut_pieces(self, row_A: Array) -> None:
        """Hand out a piece of each sample in these rows that has the number of new tokens of its request's pieces."""
        every_A = self._rows.every_R[row_A]
        if not every_A.any():
            return
        made_A = self._rows.known_R[row_A] - self._rows.prompt_R[row_A]
        for row in row_A[(every_A > 0) & (made_A % np.maximum(every_A, 1) == 0)]:
            batched, sample = self._rows.owner(row)
            if batched.request.pieces is not None:
                self._pieces.append((batched.request.pieces, sample, self._rows.turn(row, "abort")))

    def _release(self, row_A: Array, finish: Sequence[Finish]) -> list[BatchedRequest]:
        """Free rows, and move the last rows into the holes, so that the rows in use are 0..used-1 again."""
        rows, used_before = self._rows, self._rows.used
        if self.drafter:
            for row in row_A:
                self.drafter.end(*rows.owner(row), rows.token_RC[row, : rows.known_R[row]])
        left = rows.release(row_A, finish)
        kept = rows.used_R[:used_before]
        holes = np.flatnonzero(~kept[: rows.used])
        if holes.size and not self.fixed_shape:
            last = rows.used + np.flatnonzero(kept[rows.used :])
            columns = int(rows.cached_R[last].max())
            self.cache.move_rows(self._tensor(last), self._tensor(holes), columns)
            rows.move(last, holes)
        return left

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
