"""API keys: where they come from, and which of them opens which door.

Keys are kept as digests and compared in constant time, each with all of them, so that neither a dump nor a clock tells
one.  Knows no protocol: the fronts' guards are in `server.guards`."""

from __future__ import annotations

import hmac
import logging
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

log = logging.getLogger("jaxserve")

KEY_VARIABLE = "JAXSERVE_API_KEY"


class Keys:
    """A set of keys that can be asked for, not read."""

    def __init__(self, keys: Iterable[str]):
        self._digests = tuple({sha256(key.encode()).digest() for key in keys})

    def hold(self, key: str) -> bool:
        digest = sha256(key.encode(errors="surrogateescape")).digest()
        found = False
        for known in self._digests:  # all of them: how long it takes tells nothing
            found |= hmac.compare_digest(known, digest)
        return found


@dataclass(frozen=True, slots=True)
class Doors:
    """What is locked, and by which keys.  None = open."""

    users: Keys | None = None
    scrapers: Keys | None = None

    @staticmethod
    def of(
        *, api_key_file: str | None, metrics_key_file: str | None, environment: Mapping[str, str] = os.environ
    ) -> Doors:
        """ValueError when a file that is named gives no key."""
        keys = [] if api_key_file is None else read_keys(api_key_file, "api_key_file")
        if KEY_VARIABLE in environment:
            keys.append(checked(environment[KEY_VARIABLE].strip(), f"the environment variable {KEY_VARIABLE}"))
        scrapers = None if metrics_key_file is None else read_keys(metrics_key_file, "metrics_key_file")
        return Doors(Keys(keys) if keys else None, Keys(scrapers) if scrapers else None)

    def open_to_user(self, authorization: str | None) -> bool:
        return self.users is None or _holds(self.users, authorization)

    def open_to_scraper(self, authorization: str | None) -> bool:
        """Scrapers have keys of their own; a user's key opens this door too, and alone if they have none."""
        if self.scrapers is None:
            return self.open_to_user(authorization)
        return _holds(self.scrapers, authorization) or (self.users is not None and _holds(self.users, authorization))


def _holds(keys: Keys, authorization: str | None) -> bool:
    scheme, _, key = (authorization or "").strip().partition(" ")
    return scheme.lower() == "bearer" and keys.hold(key.strip())


def read_keys(path: str, field: str) -> list[str]:
    """One key a line; empty lines and those that begin with # do not count.

    ValueError when the file cannot be read or holds no key; a warning when every user of the machine may read it."""
    try:
        text = Path(path).read_text("utf-8")
        mode = Path(path).stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"{field}={path!r} cannot be read: {reason}") from None
    if mode & stat.S_IROTH:
        log.warning("%s=%r may be read by every user of this machine: chmod o-r %s", field, path, path)
    lines = [line.strip() for line in text.splitlines()]
    keys = [checked(line, f"{field}={path!r}") for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{field}={path!r} holds no key: write one a line, or leave the flag out")
    return keys


def checked(key: str, source: str) -> str:
    """A key must travel in a header.  Errors never quote it."""
    if not key:
        raise ValueError(f"{source} is set but empty: give it a key, or unset it")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError(
            f"{source} holds a key of {len(key)} characters that are not all printable ASCII without spaces"
        )
    return key
