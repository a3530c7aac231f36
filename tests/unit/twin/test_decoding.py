"""One simulated generator whose prefills take time, by hand. A decode step takes 1 s, a prefill 10 s."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from asyncrl.twin.decoding import COMPUTE, IDLE, Decoder
from asyncrl.twin.times import GenerationTimes

TIMES = GenerationTimes(step_s=1.0, sequence_s=0.0, prefill_s=10.0)


def ends(decoder: Decoder, arrivals: Mapping[float, Mapping[int, list[int]]]) -> dict[int, float]:
    """When each group ends. arrivals: tokens of the rollouts of groups, by the time of their arrival"""
    found: dict[int, float] = {}
    left = dict(arrivals)
    while left or decoder.samples:
        now = min([*left, decoder.next_end])
        found |= dict.fromkeys(decoder.advance(now), now)
        for group, lengths in left.pop(now, {}).items():
            decoder.add(group, [*lengths])
    return found


def test_groups_that_arrive_together_share_a_prefill_that_makes_their_first_tokens() -> None:
    decoder = Decoder(4, TIMES)
    assert ends(decoder, {0: {0: [3, 5], 1: [1]}}) == {1: 10.0, 0: 14.0}
    assert decoder.seconds[COMPUTE] == 14.0


def test_a_group_that_arrives_amid_a_step_stops_the_others_for_its_prefill() -> None:
    """Group 1 comes after 2.5 steps, group 2 while it is prefilled: both begin with the step after that one."""
    found = ends(Decoder(4, TIMES), {0: {0: [9]}, 12.5: {1: [3]}, 15: {2: [3]}})
    assert found == {1: 25.0, 2: 25.0, 0: 28.0}


def test_a_group_that_arrives_during_a_prefill_between_two_steps_has_another() -> None:
    assert ends(Decoder(4, TIMES), {0: {0: [9]}, 4: {1: [3]}}) == {1: 22.0, 0: 28.0}


def test_a_sequence_whose_group_is_under_way_has_no_prefill() -> None:
    """With two slots, the second rollout of group 1 begins after group 0 has ended, and makes all of its tokens in
    decode steps."""
    assert ends(Decoder(2, TIMES), {0: {0: [3], 1: [6, 4]}}) == {0: 12.0, 1: 16.0}


def test_rollouts_of_one_token_are_prefills_alone() -> None:
    decoder = Decoder(1, TIMES)
    assert ends(decoder, {0: {0: [1], 1: [1]}, 30: {2: [1]}}) == {0: 10.0, 1: 20.0, 2: 40.0}
    assert (decoder.seconds[COMPUTE], decoder.seconds[IDLE]) == (30.0, 10.0)


@pytest.mark.parametrize(("lengths", "prefills"), [((8, 9, 10), 3), ((9, 9, 9), 1)])
def test_in_a_grain_each_step_in_which_sequences_end_has_a_prefill(
    lengths: tuple[int, int, int], prefills: int
) -> None:
    """All of the first three groups are taken to end in step 8: with them three others join."""
    both = {number: [length] for number, length in enumerate([*lengths, 9, 9, 9])}
    found = ends(Decoder(3, TIMES, grain=4.0), {0: both})
    second = 18.0 + 10.0 * prefills + 8.0
    assert found == {0: 18.0, 1: 18.0, 2: 18.0, 3: second, 4: second, 5: second}


def test_prefills_that_take_no_time_of_their_own_make_no_token() -> None:
    decoder = Decoder(4, GenerationTimes(step_s=1.0, sequence_s=0.0))
    assert ends(decoder, {0: {0: [3], 1: [1]}}) == {1: 1.0, 0: 3.0}
    assert decoder.next_end == math.inf
