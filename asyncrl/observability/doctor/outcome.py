"""Rules about what a run comes to: rewards that fall, or rise for the wrong reason, nothing to learn, and lengths."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.observability.doctor.facts import Finding, RunFacts, Trend, average, percent, trend, versions
from asyncrl.observability.rows import EVALUATION, number, series

REWARD, PART = "rollout/reward/mean", "rollout/reward/part/"
LAST = 5
"""Versions whose mean is that of now."""

CARRIES = 0.8
"""The share of the gain from which on a part carries it."""


def reward_falls(facts: RunFacts) -> Iterator[Finding]:
    """Half of what was gained is lost again, or more than was there at first."""
    if (reward := trend(facts.rows, REWARD)) and _fallen(reward):
        sentence = f"The reward has fallen from {reward.best:.3g} to {reward.last:.3g}."
        evidence = f"{versions(facts.rows)}: {reward.first:.3g} at first"
        lower, hint = facts.times("learner.optimizer.lr", 1 / 3), "or a lower queue.max_staleness"
        yield Finding("warning", sentence, evidence, "learner.optimizer.lr", lower, hint)


def nothing_to_learn(facts: RunFacts) -> Iterator[Finding]:
    """Groups in which no token has an advantage. Silent while the reward rises, and where it has fallen."""
    flat, reward = facts.average("rollout/flat_group_fraction"), trend(facts.rows, REWARD)
    if flat < 0.7 or (reward and (reward.rises_from(reward.first) or _fallen(reward))):
        return
    evidence = f"{versions(facts.recent)}: reward {facts.average(REWARD):.3g} on average"
    sentence = f"{percent(flat)} of the groups teach nothing: all their rewards are equal."
    if _is_solved(facts):
        yield Finding("note", sentence, evidence, hint="Harder tasks, or stop here: these are solved")
    else:
        hint = "one rollout more may succeed; or algorithm.filter=no_spread; or easier tasks"
        yield Finding(
            "warning", sentence, evidence, "batch.group_size", facts.times("batch.group_size", 2), hint
        )


def collapse(facts: RunFacts) -> Iterator[Finding]:
    """Entropy that is gone before the tasks are solved."""
    first, now = (average(rows, "train/entropy") for rows in (facts.rows[:LAST], facts.rows[-LAST:]))
    if first is None or now is None or now >= min(0.02, 0.2 * first) or _is_solved(facts):
        return
    sentence = (
        f"The policy has collapsed: its entropy is {now:.2g} nats a token, and the tasks are not solved."
    )
    evidence = f"{versions(facts.rows[-LAST:])}: {first:.2g} at first"
    hint = "and go back to a checkpoint; or a lower learner.optimizer.lr"
    yield Finding("wrong", sentence, evidence, "algorithm.entropy_bonus", "0.001", hint)


def hacked_reward(facts: RunFacts) -> Iterator[Finding]:
    """The training reward rises, maybe after a fall, while a held-out score falls and stays low."""
    for score in held_out_scores(facts):
        scores = series(facts.evaluations, score)
        (at, best), (_, least) = (end(scores, key=lambda pair: pair[1]) for end in (max, min))
        since = trend([row for row in facts.rows if row["version"] >= at], REWARD)
        # Two scores in a row are no chance; in the lower half they do not rise again with the reward.
        low = max(value for _, value in scores[-2:])
        fallen = low <= min(best - max(0.05, 0.1 * abs(best)), (best + least) / 2)
        if not fallen or since is None or not since.rises_from(since.least):
            continue
        sentence = f"The reward is hacked: it rises, while {score} falls."
        carrier, share = _carrier(facts)
        change = (f"reward.weights.{carrier}", "0") if carrier else ("reward.function", "")
        evidence = f"since version {at}: reward {since.least:.3g} to {since.last:.3g}, {score} {best:.3g} to {low:.3g}"
        evidence += f"; {carrier} carries {percent(share)} of the gain" if carrier else ""
        hint = "or correct the function; read rollouts of high reward first"
        yield Finding("wrong", sentence, evidence, *change, hint, score)


def one_part(facts: RunFacts) -> Iterator[Finding]:
    """One part carries the gain while another one falls."""
    parts, (carrier, share) = _parts(facts), _carrier(facts)
    falling = {name: each.rise for name, each in parts.items() if each.falls()}
    if not carrier or not falling:
        return
    worst = min(falling, key=lambda name: falling[name])
    sentence = f"{carrier} carries the gain of the reward, while {worst} falls."
    moves = (f"{name} {parts[name].first:.3g} to {parts[name].last:.3g}" for name in (carrier, worst))
    evidence = f"{versions(facts.rows)}: {', '.join(moves)}; {percent(share)} of the gain"
    weight = facts.key("reward.weights", {}).get(carrier, 1.0)
    yield Finding(
        "warning", sentence, evidence, f"reward.weights.{carrier}", f"{weight / 4:g}", "a weaker part"
    )


def lengths(facts: RunFacts) -> Iterator[Finding]:
    """Rollouts that grow while no held-out score rises."""
    length, scores = trend(facts.rows, "rollout/length/mean"), [*held_out_scores(facts)][:1]
    if length is None or length.last < 1.5 * length.first or not length.rises_from(length.first):
        return
    for score in scores:
        values = [value for _, value in series(facts.evaluations, score)]
        if max(values[-2:]) <= values[0] + 0.01:
            sentence = f"Rollouts become longer, and {score} does not rise."
            evidence = f"{versions(facts.rows)}: {length.first:.0f} to {length.last:.0f} tokens, "
            evidence += f"{score} {values[0]:.3g} to {values[-1]:.3g}"
            key, hint = "algorithm.shaping.overlong_buffer", "a penalty on the last tokens before the limit"
            value = facts.times("generator.max_tokens", 0.25)
            yield Finding("warning", sentence, evidence, key, value, hint)


def held_out_scores(facts: RunFacts) -> Iterator[str]:
    """Keys of accuracies that have three scores or more, or of the first score if there are none."""
    keys = dict.fromkeys(key for row in facts.evaluations for key in row if key.startswith(EVALUATION))
    scores = [key for key in keys if not key.endswith("unscored") and len(series(facts.evaluations, key)) > 2]
    yield from [key for key in scores if key.endswith("accuracy")] or scores[:1]


def _fallen(reward: Trend) -> bool:
    """Far below its best, and by half of what was gained."""
    fall, gain = reward.best - reward.last, reward.best - reward.first
    return 0 < fall >= max(0.5 * gain, 6 * reward.noise, 0.25 * abs(reward.best))


def _is_solved(facts: RunFacts) -> bool:
    """Whether nearly all of the best reward is had."""
    best = max([number(row, "rollout/reward/max") or 0.0 for row in facts.rows], default=0.0)
    return best > 0 and facts.average(REWARD) >= 0.9 * best


def _parts(facts: RunFacts) -> dict[str, Trend]:
    """By name, of several; a single part is the reward itself."""
    keys = [key for row in facts.rows[-1:] for key in row if key.startswith(PART)]
    found = {key.removeprefix(PART): each for key in keys if (each := trend(facts.rows, key))}
    return found if len(found) > 1 else {}


def _carrier(facts: RunFacts) -> tuple[str, float]:
    """The part that makes CARRIES of the reward's gain or more, and its share; else an empty name."""
    weights, whole = facts.key("reward.weights", {}), trend(facts.rows, REWARD)
    rises = ((name, weights.get(name, 1.0) * each.rise) for name, each in _parts(facts).items())
    gains = {name: gain for name, gain in rises if gain > 0}
    name = max(gains, key=lambda each: gains[each], default="")
    share = gains[name] / sum(gains.values()) if name else 0.0
    return (name, share) if share >= CARRIES and whole and whole.rises_from(whole.first) else ("", 0.0)
