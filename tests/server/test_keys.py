"""API keys: which file gives some, which key opens which door."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from server.keys import KEY_VARIABLE, Doors, Keys


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# of the web front\nsk-one\n\n  sk-two  \n")
    path.chmod(0o600)
    return path


def doors(api_key_file: Path | None = None, metrics_key_file: Path | None = None, **environment: str) -> Doors:
    return Doors.of(
        api_key_file=None if api_key_file is None else str(api_key_file),
        metrics_key_file=None if metrics_key_file is None else str(metrics_key_file),
        environment=environment,
    )


def test_every_key_of_a_file_opens_and_nothing_else(key_file: Path) -> None:
    door = doors(key_file)
    for header in ("Bearer sk-one", "bearer sk-two", "BEARER  sk-one"):
        assert door.open_to_user(header), header
    for header in (None, "", "sk-one", "Basic sk-one", "Bearer sk-on", "Bearer sk-one2", "Bearer", "Bearer # of the web",
                   "Bearer sk-öne", "Bearer \udcff"):  # fmt: skip
        assert not door.open_to_user(header), header


def test_without_keys_everything_is_open() -> None:
    assert doors().open_to_user(None) and doors().open_to_scraper(None)


def test_the_environment_s_key_joins_the_file_s(key_file: Path) -> None:
    door = doors(key_file, JAXSERVE_API_KEY="sk-three")
    assert door.open_to_user("Bearer sk-three") and door.open_to_user("Bearer sk-one")


def test_scrapers_need_no_user_s_key_and_have_no_user_s_rights(key_file: Path, tmp_path: Path) -> None:
    scrapers = tmp_path / "scrapers"
    scrapers.write_text("scrape-me")
    door = doors(key_file, scrapers)
    assert door.open_to_scraper("Bearer scrape-me") and door.open_to_scraper("Bearer sk-one")
    assert not door.open_to_scraper(None) and not door.open_to_scraper("Bearer other")
    assert not door.open_to_user("Bearer scrape-me")
    alone = doors(None, scrapers)
    assert alone.open_to_user(None) and not alone.open_to_scraper(None) and alone.open_to_scraper("Bearer scrape-me")


def test_user_keys_alone_guard_the_metrics_too(key_file: Path) -> None:
    door = doors(key_file)
    assert door.open_to_scraper("Bearer sk-one") and not door.open_to_scraper(None)


def test_a_missing_or_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"api_key_file='.*absent' cannot be read: No such file"):
        doors(tmp_path / "absent")
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n\n")
    with pytest.raises(ValueError, match=r"metrics_key_file='.*empty' holds no key"):
        doors(None, empty)
    with pytest.raises(ValueError, match=f"{KEY_VARIABLE} is set but empty"):
        doors(JAXSERVE_API_KEY=" ")


def test_a_key_that_no_header_could_carry_is_refused_and_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("pässword", "utf-8")
    with pytest.raises(ValueError, match="8 characters that are not all printable ASCII") as caught:
        doors(path)
    assert "ssword" not in str(caught.value)


def test_a_file_for_everybody_s_eyes_is_warned_about(key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        doors(key_file)
        assert not caplog.records
        key_file.chmod(0o644)
        doors(key_file)
    assert "may be read by every user" in caplog.text and "sk-one" not in caplog.text


def test_keys_are_kept_as_digests() -> None:
    keys = Keys(["sk-one"])
    held = [getattr(keys, name) for name in vars(keys)]
    assert "sk-one" not in repr(held) and b"sk-one" not in held[0][0]
