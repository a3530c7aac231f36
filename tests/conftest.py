"""What all tests share: no deadline on any example that hypothesis tries."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
