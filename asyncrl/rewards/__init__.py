"""Ready-made reward functions, named in a config as `asyncrl.rewards:ExactMatch`; `docs/rewards.md` has examples.

    ExactMatch   the answer is the text itself, or what follows a mark
    RegexMatch   the answer is what a pattern finds
    MathVerify   the answer is worth the same as a formula (needs the extra `math`)
    UnitTests    the answer is a Python program that passes tests, in a sandbox

(and `asyncrl.rewards.classifier:Classifier`, a reward model, which is not imported here because it loads torch)

Each is a class, made once with `reward.options`, whose instances are reward functions.
"""

from asyncrl.rewards.matching import ExactMatch, RegexMatch
from asyncrl.rewards.mathematics import MathVerify
from asyncrl.rewards.unit_tests import UnitTests

__all__ = ["ExactMatch", "MathVerify", "RegexMatch", "UnitTests"]
