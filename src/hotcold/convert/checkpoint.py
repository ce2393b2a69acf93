"""Opens the folder of a Hugging Face checkpoint: its JSON files, and its tensors by name."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from hotcold.convert.settings import ConvertError, Settings, read_settings
from hotcold.convert.tensor_files import WEIGHTS, Array, Stored, open_tensors
from hotcold.values import printable

Rearrange: TypeAlias = Callable[[Array], Array]

LOADABLE = ("F32", "F16", "BF16")  #: dtypes of the safetensors format that can be converted


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder: its ``config.json``, and the file of each tensor."""

    folder: Path
    config: Settings
    files: dict[str, Stored]
    notes: tuple[str, ...] = ()  #: for the user

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self.files[name]
        return stored.file.shape(stored.name)

    def load(self, name: str, rearrange: Rearrange = lambda values: values) -> Array:
        """Reads one tensor as it is stored: float32, float16 or bfloat16; ConvertError for others."""
        return rearrange(self._read(name, LOADABLE))

    def same(self, name: str, other: str) -> bool:
        """True if two tensors have the same type, shape and bytes."""
        if self.shape(name) != self.shape(other):
            return False
        first, second = (np.ascontiguousarray(self.load(each)) for each in (name, other))
        return first.dtype == second.dtype and np.array_equal(first.view(np.uint8), second.view(np.uint8))

    def load_bytes(self, name: str) -> Array:
        """Reads one tensor of uint8."""
        return self._read(name, ("U8",))

    def _read(self, name: str, allowed: Sequence[str]) -> Array:
        stored = self.files[name]
        if (dtype := stored.file.dtype(stored.name)) not in allowed:
            raise ConvertError(f"tensor {name!r} is {dtype}: only {', '.join(allowed)} can be converted")
        return stored.file.read(stored.name)

    def settings(self, name: str) -> Settings:
        path = self.folder / name
        return read_settings(path) if path.is_file() else Settings(path, {})

    def renamed(self, prefixes: Mapping[str, str], ignored: Sequence[str]) -> "Checkpoint":
        """The checkpoint with other prefixes of names, and without the tensors whose names have an ignored
        prefix."""
        files: dict[str, Stored] = {}
        for name, stored in self.files.items():
            if not name.startswith(tuple(ignored)):
                prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
                files[prefixes.get(prefix, "") + name.removeprefix(prefix)] = stored
        return replace(self, files=files)


#: Files that show that a folder is no checkpoint: the kind of folder, and what to do.
_OTHER_FOLDERS = {
    "adapter_config.json":
        "an adapter (LoRA), not a whole model: merge it into its base model with PEFT's "
        "merge_and_unload and convert the result",
    "params.json":
        "a model in Mistral's own format (params.json, consolidated.safetensors): download config.json, "
        "model.safetensors or its shards, and tokenizer.json of the same model",
    "model_index.json": "a pipeline of diffusers: give the folder of its text encoder",
}  # fmt: skip

#: Parts that torch.compile, DDP, FSDP and PEFT add to a model's names.
_TOOLS = "_orig_mod|_fsdp_wrapped_module"
_WRAPPED = re.compile(rf"^((module|base_model\.model|{_TOOLS})\.)+|(?<=\.)({_TOOLS})\.")
_UNMERGED = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|base_layer|lora_magnitude_vector)\b")


def open_checkpoint(folder: Path) -> Checkpoint:
    """Opens a folder. ConvertError: it is no checkpoint, or one of its files is missing or damaged."""
    if not folder.is_dir():
        raise ConvertError(f"{folder} is not a folder: a Hugging Face checkpoint folder is needed")
    has_config = (folder / "config.json").is_file()
    if not has_config or not any((folder / name).is_file() for name in WEIGHTS):
        for name, description in _OTHER_FOLDERS.items():
            if (folder / name).is_file():
                raise ConvertError(f"{folder} is {description}")
    if not has_config:
        raise ConvertError(f"{folder} has no config.json: a Hugging Face checkpoint folder is needed")
    return _unwrapped(Checkpoint(folder, read_settings(folder / "config.json"), open_tensors(folder)))


def _unwrapped(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the model's own names, and a note if tools had added parts to them. ConvertError:
    it has matrices of an adapter in addition to the weights, or two tensors get one name."""
    if unmerged := next((name for name in checkpoint.files if _UNMERGED.search(name)), None):
        got = f"{checkpoint.folder} has weights and an adapter's matrices ({printable(unmerged)})"
        raise ConvertError(f"{got}: merge them with PEFT's merge_and_unload and save the result")
    files: dict[str, Stored] = {}
    wrapped = ""
    for name, stored in checkpoint.files.items():
        inner_name = _WRAPPED.sub("", name)
        if inner_name in files:
            got = f"{checkpoint.folder} has tensor {printable(inner_name)} twice"
            raise ConvertError(f"{got}, once with a prefix: save the model again")
        files[inner_name], wrapped = stored, wrapped or name * (inner_name != name)
    notes = (f"names such as {printable(wrapped)} have prefixes of training tools, which are left out",)
    return replace(checkpoint, files=files, notes=notes if wrapped else ())
