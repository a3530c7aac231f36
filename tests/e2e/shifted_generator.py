"""`asyncrl` on a machine whose clock is an hour behind."""

import sys
import time
from functools import partial

from asyncrl.cli import main
from asyncrl.launch.views import process_view
from asyncrl.telemetry.tracing import recording

BEHIND_S = 3600.0

if __name__ == "__main__":
    process_view.recording = partial(recording, wall=lambda: time.time() - BEHIND_S)
    sys.exit(main(sys.argv[1:]))
