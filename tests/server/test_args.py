"""Flags are the config's fields, and a wrong one is one sentence."""

from __future__ import annotations

import dataclasses
import os

import pytest

from jaxserve.config import EngineConfig
from server.args import Parser, ServerConfig, add_flags, choose_platform, config_of, parse_server_flags


def test_no_flags_mean_the_defaults() -> None:
    assert parse_server_flags([]) == (EngineConfig(), ServerConfig())


@pytest.mark.parametrize("config_class", [EngineConfig, ServerConfig])
def test_every_field_is_a_flag_with_help_and_group(config_class, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_server_flags(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for field in dataclasses.fields(config_class):
        assert f"--{field.name.replace('_', '-')}" in text
        assert field.metadata["help"] and f"{field.metadata['group']}:" in text


def test_the_two_configs_share_no_name() -> None:
    names = [field.name for config in (EngineConfig, ServerConfig) for field in dataclasses.fields(config)]
    assert len(names) == len(set(names))


def test_flags_reach_their_fields() -> None:
    flags = ["--slots", "7", "--no-prefix-reuse", "--batch-invariant", "--seed=3", "--memory-fraction", "0.5"]
    engine, server = parse_server_flags([*flags, "--dtype=float32", "--port", "0", "--drain-timeout", "2.5"])
    expected = EngineConfig(
        slots=7, prefix_reuse=False, batch_invariant=True, seed=3, memory_fraction=0.5, dtype="float32"
    )
    assert engine == expected
    assert server == ServerConfig(port=0, drain_timeout=2.5)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--slots", "0"], "slots=0"),
        (["--slots", "many"], "--slots"),
        (["--page-size", "17"], "page_size=17"),
        (["--accelerator", "npu"], "npu"),
        (["--port", "70000"], "port=70000"),
        (["--drain-timeout", "nan"], "drain_timeout=nan"),
        (["--max-message-mb", "0"], "max_message_mb=0"),
        (["--max-prompt-mb", "65"], "max_prompt_mb=65"),
        (["--tokenizer-threads", "0"], "tokenizer_threads=0"),
        (["--host", ""], "host"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--slot", "3"], "--slot"),  # no guessing
    ],
)
def test_a_wrong_flag_is_one_sentence_and_exit_code_2(
    flags: list[str], words: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_server_flags(flags)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_config_round_trips_through_flags() -> None:
    parser = Parser("x")
    add_flags(parser, ServerConfig)
    assert config_of(parser.parse_args(["--host", "::1"]), ServerConfig).host == "::1"


@pytest.mark.parametrize(
    ("accelerator", "platforms"), [("cpu", "cpu"), ("gpu", "cuda,cpu"), ("tpu", "tpu,cpu"), ("auto", "before")]
)
def test_the_platform_is_chosen_by_environment(
    accelerator: str, platforms: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "before")
    choose_platform(accelerator)
    assert os.environ["JAX_PLATFORMS"] == platforms
