"""Evaluates a model with EleutherAI's lm-evaluation-harness, in process: every request is batched by the engine.

    python scripts/evaluate.py --tasks arc_easy,lambada_openai --model gemma3-270m --limit 200
    python scripts/evaluate.py --tasks my_task --include-path my_tasks/ --output out/

Prints the scores as a table and writes report.json and report.md.  Every option of the engine is a flag (--help).

Exit codes: 0 done, 1 a task or the engine failed, 2 wrong flags or names, 130 Ctrl-C."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import _path  # noqa: F401  first: it makes the imports below work
from rich.console import Console

from jaxserve.config import EngineConfig
from jaxserve.request import RequestError
from server.args import Parser, add_flags, choose_platform, config_of
from server.backend import Backend


def load(config: EngineConfig) -> Backend:
    """The engine, warm and started."""
    from jaxserve.start import load_engine  # imports jax

    engine = load_engine(config, console=Console(stderr=True))
    engine.start()
    return engine


def main(argv: Sequence[str] | None = None, load: Callable[[EngineConfig], Backend] = load) -> int:
    parser = Parser("Evaluate a model with lm-evaluation-harness.")
    _add_flags(parser)
    add_flags(parser, EngineConfig)
    flags = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    os.environ.setdefault("TQDM_DISABLE", "1")  # the harness's bars: rich draws ours
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # its bootstraps would fork a process full of threads
    try:
        return run(flags, config_of(flags, EngineConfig), load)
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        parser.error("the harness is not installed: pip install 'jaxserve[eval]'")
    except ValueError as error:
        parser.error(str(error))
    except (OSError, RequestError) as error:
        print(f"evaluate: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("evaluation")
    group.add_argument("--tasks", required=True, help="names, patterns (mmlu_*) or .yaml files, comma-separated")
    group.add_argument("--include-path", type=Path, metavar="FOLDER", help="tasks of your own, found before others")
    group.add_argument("--limit", type=float, metavar="N", help="documents per task (below 1: a share of them)")
    group.add_argument("--num-fewshot", type=int, metavar="N", help="examples before each question")
    group.add_argument("--apply-chat-template", action="store_true", help="put questions through the model's template")
    group.add_argument("--gen-kwargs", metavar="NAME=VALUE,...", help="over a task's own generation_kwargs")
    group.add_argument(
        "--add-bos", action=argparse.BooleanOptionalAction, help="begin texts with BOS (default: as the tokenizer does)"
    )
    group.add_argument("--bootstrap-iters", type=int, default=1000, metavar="N", help="for standard errors; 0 = none")
    group.add_argument("--confirm-run-unsafe-code", action="store_true", help="let tasks run code that models write")
    group.add_argument("--log-samples", action="store_true", help="also write every document and answer")
    group.add_argument("--output", type=Path, default=Path("evaluation"), metavar="FOLDER", help="of the report")


def run(flags: argparse.Namespace, config: EngineConfig, load: Callable[[EngineConfig], Backend]) -> int:
    """Finds the tasks before the model is loaded: that is where most mistakes are."""
    choose_platform(config.accelerator)
    from evaluation.report import Run, tables, write_report  # imports the harness, which takes seconds
    from evaluation.tasks import find_tasks

    if flags.limit is not None and flags.limit <= 0:
        raise ValueError(f"limit={flags.limit:g} must be above 0")
    manager, names = find_tasks(flags.tasks.split(","), flags.include_path)
    flags.output.mkdir(parents=True, exist_ok=True)
    from evaluation.model import JaxserveLM
    from lm_eval.evaluator import simple_evaluate

    engine = load(config)
    begin = time.monotonic()
    try:
        lm = JaxserveLM(engine, add_bos=flags.add_bos)
        results = simple_evaluate(
            model=lm,
            tasks=[*names],
            task_manager=manager,
            num_fewshot=flags.num_fewshot,
            limit=flags.limit,
            apply_chat_template=flags.apply_chat_template,
            fewshot_as_multiturn=flags.apply_chat_template,
            gen_kwargs=flags.gen_kwargs,
            bootstrap_iters=flags.bootstrap_iters,
            log_samples=flags.log_samples,
            confirm_run_unsafe_code=flags.confirm_run_unsafe_code,
        )
        assert results is not None, "one process evaluates"
        seconds = time.monotonic() - begin
        facts = Run(
            info=engine.info,
            config=config,
            load=engine.load(),
            seconds=seconds,
            num_truncated=lm.num_truncated,
        )
    finally:
        engine.stop(0)
    write_report(flags.output, results, facts)
    print(tables(results))
    print(f"evaluate: {seconds:.0f} s; {flags.output / 'report.json'} and report.md are written", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
