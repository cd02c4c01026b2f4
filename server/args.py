"""Command-line flags made from config dataclasses: one field, one flag, one keyword of LLM.

A field's metadata gives the help text and the group; its type gives the parser.  Nothing here imports jax: the platform
must be chosen before jax is imported, and `--help` should be quick."""

from __future__ import annotations

import argparse
import dataclasses
import os
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from jaxserve.config import EngineConfig, option

LogLevel = Literal["debug", "info", "warning", "error"]
MIB = 2**20

# cpu stays reachable beside an accelerator, as it is when jax chooses by itself
PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """All options of the service.  Raises ValueError naming the field and the numbers."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 = every network interface", "service")
    port: int = option(50051, "port of the gRPC service; 0 = any free one", "service")
    http_port: int = option(8000, "port of the HTTP service; 0 = any free one, -1 = no HTTP", "service")
    drain_timeout: float = option(30.0, "seconds that running requests get to finish after SIGTERM", "service")
    max_message_mb: int = option(64, "largest gRPC message (both ways) and HTTP body in MiB", "service")
    max_prompt_mb: int = option(4, "longest prompt text in MiB (a chat's contents together)", "service")
    tokenizer_threads: int = option(2, "threads that encode prompts and render chat templates", "service")
    log_level: LogLevel = option("info", "what goes to stderr", "service")  # noqa: RUF009  (it is dataclasses.field)

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host is empty: name an address, e.g. 127.0.0.1 or 0.0.0.0")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port} must be between 0 and 65535")
        if not -1 <= self.http_port <= 65535:
            raise ValueError(f"http_port={self.http_port} must be between 0 and 65535, or -1 for no HTTP")
        if self.http_port == self.port > 0:
            raise ValueError(f"http_port={self.http_port} is the gRPC service's port: choose another")
        if not 0 <= self.drain_timeout <= 86400:
            raise ValueError(f"drain_timeout={self.drain_timeout} must be between 0 and 86400 seconds")
        if not 1 <= self.max_message_mb <= 1024:
            raise ValueError(f"max_message_mb={self.max_message_mb} must be between 1 and 1024")
        if not 1 <= self.max_prompt_mb <= self.max_message_mb:
            raise ValueError(
                f"max_prompt_mb={self.max_prompt_mb} must be between 1 and max_message_mb={self.max_message_mb}"
            )
        if not 1 <= self.tokenizer_threads <= 64:
            raise ValueError(f"tokenizer_threads={self.tokenizer_threads} must be between 1 and 64")


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence on stderr (a usage of forty flags would bury it) and exit code 2."""

    def __init__(self, description: str):
        super().__init__(description=description, allow_abbrev=False)

    def error(self, message: str) -> typing.NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (--help lists the flags)\n")


Config = TypeVar("Config", EngineConfig, ServerConfig)


def add_flags(
    parser: argparse.ArgumentParser, config_class: type[Config], *, only: Sequence[str] | None = None
) -> None:
    """A flag for every field of `config_class` (or only for these), in the groups that its metadata names."""
    hints = typing.get_type_hints(config_class)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in dataclasses.fields(config_class):
        if only is not None and field.name not in only:
            continue
        name = field.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        group = groups[name]
        text = field.metadata["help"].replace("%", "%%")
        text += "" if field.default is None else f" (default: {field.default})"
        flag = "--" + field.name.replace("_", "-")
        hint = _flag_type(hints[field.name])
        if hint is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default, help=text)
        elif typing.get_origin(hint) is Literal:
            group.add_argument(flag, choices=typing.get_args(hint), default=field.default, help=text)
        else:
            group.add_argument(flag, type=hint, default=field.default, help=text, metavar=hint.__name__.upper())


def config_of(flags: argparse.Namespace, config_class: type[Config]) -> Config:
    """The config that the parsed flags spell out.  ValueError from its own checks."""
    return config_class(**{field.name: getattr(flags, field.name) for field in dataclasses.fields(config_class)})


def parse_server_flags(argv: Sequence[str] | None) -> tuple[EngineConfig, ServerConfig]:
    """What `serve.py` was told; a wrong value ends the process with one sentence and exit code 2."""
    parser = Parser("Serve a language model over gRPC and HTTP.")
    add_flags(parser, EngineConfig)
    add_flags(parser, ServerConfig)
    flags = parser.parse_args(argv)
    try:
        return config_of(flags, EngineConfig), config_of(flags, ServerConfig)
    except ValueError as error:
        parser.error(str(error))


def choose_platform(accelerator: str) -> None:
    """Tells jax which platform to start; only of use before jax is imported.  `auto` leaves the choice to jax."""
    if accelerator in PLATFORMS:
        os.environ["JAX_PLATFORMS"] = PLATFORMS[accelerator]


def _flag_type(hint):
    """`int | None` -> int: a flag that is not given keeps its default.  `int | str` -> str: the config reads the number."""
    if isinstance(hint, types.UnionType):
        *_, hint = (part for part in typing.get_args(hint) if part is not types.NoneType)
    return hint
