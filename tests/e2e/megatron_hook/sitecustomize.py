"""Python runs this first where the folder is on its path: a learner's ranks get Megatron-core's shim."""

import os
import sys
from pathlib import Path

if "learner" in sys.orig_argv and "RANK" in os.environ:
    sys.path.insert(0, str(Path(__file__).parents[2] / "helpers" / "learner"))
    import megatron_shim

    megatron_shim.install()
