"""URLs of Redis: of one server, or of sentinels that know which server is the primary now.

redis://[NAME:PASSWORD@]HOST:PORT/DB                         also rediss:// (TLS) and unix://
redis+sentinel://[NAME:PASSWORD@]HOST:PORT,HOST:PORT/PRIMARY/DB[?replicas=1]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

SERVERS = ("redis", "rediss", "unix")
SENTINELS = ("redis+sentinel", "rediss+sentinel")
SENTINEL_PORT = 26379

FLAGS: Mapping[str, str | bool] = {"true": True, "yes": True, "false": False, "no": False}
"""Values of options that are no texts."""


@dataclass(frozen=True)
class SentinelUrl:
    """Sentinels, and the primary that they watch.

    Attributes:
        hosts: Host and port of each sentinel.
        primary: The name that the sentinels have for it.
        db: Number of its database.
        credentials: `username` and `password` of the servers, as far as the URL has them.
        replicas: How many must have a write before it counts.
        tls: Whether servers and sentinels are reached over TLS.
        tls_options: `ssl_…` words of redis-py, e.g. `ssl_ca_certs`.
    """

    hosts: tuple[tuple[str, int], ...]
    primary: str
    db: int
    credentials: dict[str, str]
    replicas: int
    tls: bool
    tls_options: dict[str, str | bool]

    @staticmethod
    def of(url: str) -> SentinelUrl:
        """ValueError for a URL that is none.

        >>> SentinelUrl.of("redis+sentinel://a:1,[::1]:2,c/main/3?replicas=2").hosts
        (('a', 1), ('::1', 2), ('c', 26379))
        """
        scheme, _, rest = url.partition("://")
        place, _, query = rest.partition("?")
        servers, _, path = place.partition("/")
        login, _, hosts = servers.rpartition("@")
        username, _, password = map(unquote, login.partition(":"))
        primary, _, db = path.partition("/")
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
        replicas, tls = int(options.pop("replicas", "1")), scheme == SENTINELS[1]
        known = all(tls and name.startswith("ssl_") for name in options)
        if scheme not in SENTINELS or not primary or replicas < 1 or int(db or "0") < 0 or not known:
            raise ValueError("no URL of sentinels, no primary, no replica, or an unknown option")
        credentials = {"username": username, "password": password}
        return SentinelUrl(
            hosts=tuple(_host(each) for each in hosts.split(",")),
            primary=unquote(primary),
            db=int(db or "0"),
            credentials={name: value for name, value in credentials.items() if value},
            replicas=replicas,
            tls=tls,
            tls_options={name: FLAGS.get(value.lower(), value) for name, value in options.items()},
        )


def is_redis_url(url: str) -> bool:
    """Whether redis-py can read it; whether a server answers there is not looked at.

    >>> [is_redis_url(url) for url in ("redis://h:6379/0", "http://h", "redis://:x", "redis+sentinel://h/main")]
    [True, False, False, True]
    """
    try:
        if url.startswith(SENTINELS):
            return bool(SentinelUrl.of(url))
        parts = urlsplit(url)
        return parts.scheme in SERVERS and (parts.port is None or bool(parts.hostname))
    except ValueError:  # its text may hold a part of the password
        return False


def _host(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("a sentinel without a host")
    return parts.hostname, parts.port or SENTINEL_PORT
