"""Python runs this first where the folder is on its path: learners get Megatron-core's shim, others nothing."""

import sys
from pathlib import Path

if "learner" in sys.orig_argv and "torch.distributed.run" not in sys.orig_argv:
    sys.path.insert(0, str(Path(__file__).parents[2] / "helpers" / "learner"))
    import megatron_shim

    megatron_shim.install()
