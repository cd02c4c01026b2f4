"""Which tasks a run means: names and patterns of the harness or of a local folder, or files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lm_eval.tasks import TaskManager
from lm_eval.utils import pattern_match


def find_tasks(wanted: Sequence[str], include_path: Path | None) -> tuple[TaskManager, list[str]]:
    """-> who loads them, and their names.  The harness's own tasks, thousands of files, are read only when the local
    folder does not hold every name.  ValueError names those that are nowhere."""
    if include_path is not None and not include_path.is_dir():
        raise ValueError(f"include_path={include_path} is not a folder")
    manager = TaskManager(include_path=include_path, include_defaults=False)
    names, missing = _match(wanted, manager)
    if missing:
        manager = TaskManager(include_path=include_path)
        names, missing = _match(wanted, manager)
    if missing:
        where = "the harness's tasks" if include_path is None else f"{include_path} nor the harness's tasks"
        raise ValueError(f"no task is called {', '.join(missing)} in {where} (name a local folder with --include-path)")
    return manager, names


def _match(wanted: Sequence[str], manager: TaskManager) -> tuple[list[str], list[str]]:
    names: dict[str, None] = {}
    missing = []
    for name in wanted:
        found = (
            [name] if Path(name).suffix == ".yaml" and Path(name).is_file() else pattern_match(name, manager.all_tasks)
        )
        names |= dict.fromkeys(found)
        if not found:
            missing.append(name)
    return list(names), missing
