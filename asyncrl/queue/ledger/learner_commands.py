"""What the learner asks of a ledger: claims, and what has become of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from asyncrl.errors import RefusedError
from asyncrl.queue.ledger import events as ev
from asyncrl.queue.ledger.commands import Commands
from asyncrl.queue.ledger.ledger_state import CORRUPT
from asyncrl.queue.ledger.rules.claims import next_claim
from asyncrl.queue.ledger.rules.lookahead import next_lead
from asyncrl.queue.ledger.settings import Frontier, StreamSettings
from asyncrl.types import Version

LOST = "lost"
"""Why a step begins anew whose groups nobody can fetch any more."""


class Claimed(NamedTuple):
    """One rank's share of a claim. last: it completes the step. so_far: groups of the step up to here.

    attempt: goes with the step's further claims, which are refused if the step has begun anew since.
    """

    ordinals: tuple[int, ...]
    last: bool
    so_far: int
    attempt: int = 0


class LearnerCommands(Commands):
    """`learner_epoch` is that of the opening; after another one it is fenced."""

    def claim(
        self,
        learner_epoch: int,
        step: int,
        index: int,
        rank: int,
        max_tokens: int,
        whole: bool,
        attempt: int | None = None,
    ) -> Claimed | None:
        """Rank `rank`'s share of the `index`-th claim of step `step`; None: not yet.

        The first rank that asks fixes the shares of all. whole=False takes what is ready inside the window;
        whole=True takes the longest prefix in ordinal order, once it cannot grow any more. The last step of an
        exhausted stream may be short, and its last claim empty; a step after that is refused as 'exhausted'.
        'abandoned': the step has begun anew since the claim that told `attempt`, or does so now, since the bytes of
        some of this share are lost.
        """
        settings, book = self.require_learner(learner_epoch), self.book
        if not 0 <= rank < settings.learners or index < 0:
            raise RefusedError("malformed", f"claim {index} for rank {rank} of {settings.learners}")
        if step < book.version:
            raise RefusedError("trained", f"step {step} is over, the stream is at step {book.version}")
        if step > book.version:
            return None
        if index > len(book.claims) or attempt not in (None, book.attempt):
            raise RefusedError("abandoned", f"step {step} has begun anew, at claim 0")
        if index == len(book.claims):
            claim = next_claim(book, max_tokens, whole)
            if claim is None:
                return None
            self.apply(claim)
        if self.has_lost(book.claims[index].shares[rank]):
            self.apply(ev.StepAbandoned(step, (), LOST))
            raise RefusedError("abandoned", f"groups of step {step} are lost, it has begun anew, at claim 0")
        later = sum(len(share) for claim in book.claims[index + 1 :] for share in claim.shares)
        so_far = book.claimed - later
        return Claimed(book.claims[index].shares[rank], book.claims[index].last, so_far, book.attempt)

    def trained(self, learner_epoch: int, step: int, waited: float | None = None) -> Version:
        """The step's groups are TRAINED(step + 1) and that version counts as published. Idempotent.

        A step may be short of B groups only if it was before a rewind, or after a drain: nothing pending, leased
        or ready. waited: the share of the step's time that the learner waited for groups.
        """
        settings, book = self.require_learner(learner_epoch), self.book
        if step == book.version - 1:
            return book.version
        self.require_step(step)
        full = book.claimed >= settings.groups_per_version or (book.dry and book.claimed) or book.replayed
        if not full:
            raise RefusedError(
                "incomplete", f"step {step} has {book.claimed} of {settings.groups_per_version} groups"
            )
        repeated = step in book.replay
        self.apply(ev.StepTrained(step))
        if waited is not None and book.lead is not None and not repeated:
            lead = next_lead(book.lead, waited, settings)
            if lead != book.lead:
                self.apply(ev.LeadSet(lead))
        return book.version

    def reject(self, learner_epoch: int, step: int, reason: str) -> int:
        """The step's groups are DROPPED(reason); other groups take their place. Returns how many."""
        self.require_learner(learner_epoch)
        self.require_step(step)
        rejected = self.book.claimed
        if rejected:
            self.apply(ev.StepRejected(step, reason))
        return rejected

    def abandon(
        self, learner_epoch: int, step: int, attempt: int, dropped: Collection[int], reason: str
    ) -> int:
        """The running step begins anew: those of its groups in `dropped` are DROPPED(reason), the others come back.

        Returns the attempt that the step is at now; asked again with the same attempt: nothing.
        """
        self.require_learner(learner_epoch)
        self.require_step(step)
        book = self.book
        claimed = {ordinal for claim in book.claims for share in claim.shares for ordinal in share}
        if attempt == book.attempt:
            if not claimed.issuperset(dropped):
                raise RefusedError("unknown", f"{sorted(set(dropped) - claimed)} are not of step {step}")
            self.apply(ev.StepAbandoned(step, tuple(sorted(dropped)), reason))
        return book.attempt

    def checkpointed(self, learner_epoch: int, version: Version) -> None:
        """A checkpoint of `version` is committed: no rewind will go back to before it. Again: nothing."""
        self.require_learner(learner_epoch)
        if version > self.book.version:
            raise RefusedError("step", f"the stream is at version {self.book.version}, not {version}")
        if version > self.book.retention.floor:
            self.apply(ev.Checkpointed(version))

    def collect(
        self, learner_epoch: int, got: Collection[int] = (), corrupt: Collection[int] = ()
    ) -> tuple[int, ...]:
        """All ready groups of an unbounded stream. got: what earlier answers brought, which ends with this.

        corrupt: what they brought that could not be read, which is DROPPED.
        """
        settings = self.require_learner(learner_epoch)
        if settings.max_staleness is not None:
            raise RefusedError("bounded", "groups of a bounded stream are claimed by step")
        ended = tuple(sorted({*got} & {*self.book.ready}))
        if ended:
            self.apply(ev.Collected(ended))
        for ordinal in sorted({*corrupt} & {*self.book.ready}):
            self.apply(ev.Dropped(ordinal, CORRUPT))
        return tuple(self.book.ready)

    def frontier(self, learner_epoch: int) -> Frontier:
        """Where the stream stands after the last trained step; later claims count as not made."""
        self.require_learner(learner_epoch)
        return self.book.as_frontier()

    # ------------------------------------------------------------------ checks

    def has_lost(self, ordinals: Iterable[int]) -> bool:
        return any(self.book.items[ordinal].lost for ordinal in ordinals)

    def require_learner(self, learner_epoch: int) -> StreamSettings:
        settings = self.require_open()
        if learner_epoch != self.book.learner_epoch:
            raise RefusedError(
                "fenced", f"learner epoch {learner_epoch} is over, {self.book.learner_epoch} has the stream"
            )
        return settings

    def require_step(self, step: int) -> None:
        if step != self.book.version:
            raise RefusedError("step", f"the stream is at step {self.book.version}, not {step}")
