"""The URLs of the platform and of Redis: which ones are taken, and what one that names Sentinels says."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

#: Schemes of a Redis that Sentinels watch over, the second with TLS to them and to Redis.
SENTINEL, SENTINEL_TLS = "sentinel", "sentinels"
#: The port of a Sentinel whose address has none.
SENTINEL_PORT = 26379
#: What stands behind the `?` of a Sentinel URL; redis-py has the options of TLS under the same names.
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
OPTIONS = ("master", "sentinel_password", *TLS_OPTIONS)


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """A Redis whose address Sentinels know: `sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/DB?master=NAME`.

    `username` and `password` are Redis's, `sentinel_password` is the Sentinels'. `tls` are the options of TLS as
    redis-py names them, None without TLS.
    """

    sentinels: tuple[tuple[str, int], ...]
    master: str
    db: int
    username: str | None
    password: str | None = field(repr=False)
    sentinel_password: str | None = field(repr=False)
    tls: dict[str, str] | None


def platform_url(text: str) -> str:
    """Return the platform's URL without a slash at its end.

    Raises:
        ValueError: it can't be one.
    """
    url = _parts(text)
    if not url or url.scheme not in {"http", "https"} or not url.hostname or "@" in url.netloc or url.query:
        raise ValueError("must be an http:// or https:// URL without credentials or a query")
    return text.rstrip("/")


def redis_url(text: str) -> str:
    """Return a URL of Redis as it is.

    Raises:
        ValueError: it can't be one. No error of this module shows a part of it.
    """
    if sentinel_url(text):
        return text
    url = _parts(text)
    if not url or not (url.hostname if url.scheme in {"redis", "rediss"} else url.scheme == "unix" and url.path):
        raise ValueError("must be a redis://, rediss://, unix://, sentinel:// or sentinels:// URL")
    return text


def sentinel_url(text: str) -> SentinelUrl | None:
    """Return what a Sentinel URL says; None for a URL of another scheme.

    Raises:
        ValueError: it is not whole.
    """
    scheme, _, rest = text.partition("://")
    if scheme not in {SENTINEL, SENTINEL_TLS}:
        return None
    try:
        return _read(rest, with_tls=scheme == SENTINEL_TLS)
    except ValueError as error:
        raise ValueError(f"{error}; must be {scheme}://:PASSWORD@HOST:PORT,HOST:PORT/DB?master=NAME") from None


def _read(rest: str, *, with_tls: bool) -> SentinelUrl:
    place, _, query = rest.partition("?")
    netloc, _, db = place.partition("/")
    credentials, _, addresses = netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if not set(options) <= set(OPTIONS):
        raise ValueError(f"has an unknown option; allowed: {', '.join(OPTIONS)}")
    tls = {name: value for name, value in options.items() if name in TLS_OPTIONS}
    if tls and not with_tls:
        raise ValueError(f"has an option of TLS, which needs {SENTINEL_TLS}://")
    if not options.get("master"):
        raise ValueError("does not name the master, as the Sentinels call it")
    if db and not (db.isascii() and db.isdigit()):
        raise ValueError("names no database by its number")
    return SentinelUrl(
        sentinels=tuple(_address(address) for address in addresses.split(",")),
        master=options["master"],
        db=int(db or 0),
        username=unquote(user) or None,
        password=unquote(password) or None,
        sentinel_password=options.get("sentinel_password") or None,
        tls=tls if with_tls else None,
    )


def _address(text: str) -> tuple[str, int]:
    parts = _parts(f"//{text}")
    if not parts or not parts.hostname:
        raise ValueError("has a Sentinel without a host, or with a wrong port")
    return parts.hostname, parts.port or SENTINEL_PORT


def _parts(text: str) -> SplitResult | None:
    """Return the parts of a URL, None for what is none. urllib's own errors would quote the credentials."""
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018 - raises for a bad port
    except ValueError:
        return None
    return parts
