"""Passwords in URLs are left out of everything that is shown."""

from __future__ import annotations

import re
from typing import Any

_IN_PLACE = re.compile(r"(\w://[^\s:@/'\"]*):[^\s'\"]*@")
_IN_QUERY = re.compile(r"([?&](?:ssl_)?password=)[^&\s'\"]*")
_WHOLE = re.compile(r"\A(\s*[\w+.-]+://[^:@/]*):.*@", re.DOTALL)
_WHOLE_QUERY = re.compile(r"\A(\s*[\w+.-]+://.*?[?&](?:ssl_)?password=)[^&]*", re.DOTALL)


def masked(text: str) -> str:
    """`text` with *** in place of each password in a URL. It masks too much rather than too little. In text around a
    URL, a password ends at a space or a quote; `masked_value` finds the end of one that holds these.

    >>> masked("queue.redis_url = 'rediss://me:se/cr@t@host:6380/2'")
    "queue.redis_url = 'rediss://me:***@host:6380/2'"
    >>> masked("redis://host:6379/0?db=1&password=secret"), masked("http://127.0.0.1:8000/v1")
    ('redis://host:6379/0?db=1&password=***', 'http://127.0.0.1:8000/v1')
    """
    return _IN_QUERY.sub(r"\1***", _IN_PLACE.sub(r"\1:***@", text))


def masked_url(url: str) -> str:
    """As `masked`, of a text that is a URL and nothing else: the password ends at the last @.

    >>> masked_url("redis://me:it's my @@ word@host:6379/0"), masked_url("redis://host?password=a b&db=1")
    ('redis://me:***@host:6379/0', 'redis://host?password=***&db=1')
    """
    return masked(_WHOLE_QUERY.sub(r"\1***", _WHOLE.sub(r"\1:***@", url)))


def masked_value(value: Any) -> Any:
    """The value of a key, with `masked_url` of each text in it."""
    if isinstance(value, str):
        return masked_url(value)
    if isinstance(value, dict):
        return {name: masked_value(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(masked_value, value))
    return value
