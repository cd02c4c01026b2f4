"""A tree of device arrays -> a folder, and back, in the layout it was saved in.  Knows nothing of models.

The folder: `params/` (written by orbax, uncompressed), `config.json`, whatever the caller adds, and `jaxserve.json`,
written last: the format's version, the caller's facts about the tree, the shape of every array and the size of every
file, so that a torn copy or a tree that does not fit is noticed before anything is read."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_utils

FORMAT = 1
HEADER, CONFIG, PARAMS = "jaxserve.json", "config.json", "params"

Tree = dict  # nested, string keys, arrays (or ShapeDtypeStructs with a sharding) at the leaves


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name when the block ends well, and vanishes when it does not.

    Raises ValueError when `folder` is there already and not empty.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ValueError(f"{folder} exists already and is not empty")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield draft
        draft.chmod(0o755)  # mkdtemp's are for their owner alone
        draft.replace(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def save(folder: Path, params: Tree, *, config: Mapping, facts: Mapping) -> None:
    """Into a folder of `new_folder`, after everything else that goes there.  `facts`: what a reader must know first."""
    with ocp.Checkpointer(_handler()) as checkpointer:
        checkpointer.save((folder / PARAMS).absolute(), params)
    (folder / CONFIG).write_text(json.dumps(dict(config), indent=1, sort_keys=True) + "\n")
    header = {"format": FORMAT, "facts": dict(facts), "shapes": _shapes(params), "files": _sizes(folder)}
    (folder / HEADER).write_text(json.dumps(header, indent=1, sort_keys=True) + "\n")


class OrbaxStore:
    """A saved folder.  Raises ValueError naming what is wrong with it; reads no weight before `restore`."""

    def __init__(self, path: Path):
        self.path = path
        header = self._read(HEADER)
        if header.get("format") != FORMAT:
            raise ValueError(
                f"{path} is saved in format {header.get('format')!r}, this version reads {FORMAT}:"
                " convert the model again"
            )
        sizes = _sizes(path)
        torn = [name for name, size in header["files"].items() if sizes.get(name) != size]
        if torn:
            raise ValueError(
                f"{path} is not whole: {len(torn)} of {len(header['files'])} files are missing or cut,"
                f" e.g. {sorted(torn)[0]}"
            )
        self.facts: dict = header["facts"]
        self._shapes: dict[str, list[int]] = header["shapes"]
        self.config: dict = self._read(CONFIG)

    def restore(self, target: Tree) -> Tree:
        """The saved tree on the devices.  `target`: the same tree of ShapeDtypeStructs, each with its sharding; another
        dtype than the saved one is converted.  Raises ValueError when the trees differ."""
        wanted = _shapes(target)
        if wrong := sorted(name for name in wanted | self._shapes if wanted.get(name) != self._shapes.get(name)):
            first = f"{wrong[0]} is {self._shapes.get(wrong[0])}, the model wants {wanted.get(wrong[0])}"
            raise ValueError(f"{self.path} does not fit its config.json in {len(wrong)} weights, e.g. {first}")
        restored: dict = {}
        with ocp.Checkpointer(_handler()) as checkpointer:
            for part in _batches(target):
                arguments = ocp.args.PyTreeRestore(
                    item=part, restore_args=checkpoint_utils.construct_restore_args(part), partial_restore=True
                )
                try:
                    part = checkpointer.restore((self.path / PARAMS).absolute(), args=arguments)
                except (OSError, KeyError, ValueError) as error:
                    raise ValueError(f"{self.path} cannot be read: {error}") from error
                restored |= _flat(jax.block_until_ready(part))
        return _nested(restored)

    def _read(self, name: str) -> dict:
        try:
            content = json.loads((self.path / name).read_text())
        except FileNotFoundError:
            raise ValueError(f"{self.path} is no checkpoint saved by jaxserve: it has no {name}") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path / name} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{self.path / name} holds no JSON object")
        return content


def _handler() -> ocp.PyTreeCheckpointHandler:
    """One plain uncompressed file a weight: the fastest to load (a compressed one takes five times as long)."""
    return ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)


def _batches(tree: Tree) -> Iterator[Tree]:
    """The tree in parts of about 1/8 of its bytes, largest leaves first: orbax holds a part on the host and on the
    device at once, and one leaf at a time would not keep the disk busy."""
    leaves = sorted(_flat(tree).items(), key=lambda item: -_nbytes(item[1]))
    limit = sum(_nbytes(leaf) for _, leaf in leaves) / 8
    part, size = {}, 0
    for name, leaf in leaves:
        if part and size + _nbytes(leaf) > limit:
            yield _nested(part)
            part, size = {}, 0
        part[name] = leaf
        size += _nbytes(leaf)
    yield _nested(part)


def _nbytes(leaf: jax.ShapeDtypeStruct) -> int:
    return leaf.size * leaf.dtype.itemsize


def _flat(tree: Tree) -> dict:
    """{"blocks/0/mlp/down": leaf}"""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _nested(flat: Mapping) -> Tree:
    tree: Tree = {}
    for name, leaf in flat.items():
        *keys, last = name.split("/")
        node = tree
        for key in keys:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def _shapes(tree: Tree) -> dict[str, list[int]]:
    return {name: list(leaf.shape) for name, leaf in _flat(tree).items()}


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file below `folder`, by its path inside it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != HEADER)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
