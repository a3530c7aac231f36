"""Python loads it at its start, from a folder on PYTHONPATH: `time.time` is then off by what a file has.

bench/chaos/jumping_clock.py writes that file. Clocks that are read elsewhere, e.g. in C++, do not jump.
"""

import mmap
import os
import struct
import time

with open(os.environ["CHAOS_CLOCK"], "rb") as file:
    _shared = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
_offset_s, _time, _time_ns = struct.Struct("d").unpack_from, time.time, time.time_ns
time.time = lambda: _time() + _offset_s(_shared)[0]
time.time_ns = lambda: _time_ns() + round(_offset_s(_shared)[0] * 1e9)
