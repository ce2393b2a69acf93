"""Reads names of models on the Hugging Face hub, and finds the files that they mean. Uses no network.

``hf:OWNER/NAME/FILE.gguf`` names a file, ``OWNER/NAME:Q4_K_M`` a repository and its quantisation, either with
``@REVISION`` (a branch, a tag or a commit) at the end. ``hf.co/`` instead of ``hf:``, as Ollama writes it,
and addresses of the hub's pages and files mean the same. A repository's list of files is untrusted: no name
may leave its folder."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

from hotcold.errors import UserError
from hotcold.formats.gguf_split import part_name, part_names
from hotcold.values import shown

PREFIX = "hf:"
#: The hub's address before a name; ``Path`` makes one slash of an address's two.
_ADDRESS = re.compile(r"(?:https?://?)?(?:www\.)?(?:hf\.co|huggingface\.co)/", re.IGNORECASE)
#: A page or a file of a repository in an address.
_PAGE = re.compile(
    r"(?P<repo>[^/]+/[^/:@]+)(?:/(?:tree|blob|resolve|raw)/(?P<revision>[^/]+)(?:/(?P<file>.+))?)?/?"
)

_OWN_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_-])?"
_NAME = re.compile(
    rf"(?:hf:)?(?P<repo>{_OWN_NAME}/{_OWN_NAME})(?:[:/](?P<rest>[^@]+))?(?:@(?P<revision>.+))?", re.DOTALL
)
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
_QUANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}")
#: Block types in names of files, as people write them after the colon.
_TYPE = re.compile(
    r"(?<![A-Z0-9])(?:UD-)?(?:I?Q[0-9](?:_[A-Z0-9]+)*|TQ[12]_0|MXFP4(?:_MOE)?|BF16|F16|F32)(?![A-Z0-9_])",
    re.IGNORECASE,
)
#: GGUF files that are not models: image encoders, importance matrices, Hotcold's sidecars.
_NO_MODEL = re.compile(r"mmproj|imatrix|\.predictor\.gguf$|\.profile\.gguf$", re.IGNORECASE)
_SIDECARS = (".predictor.gguf", ".profile.gguf")
_LONGEST = 1024
_LISTED = 24

#: The allowed forms, for messages.
FORMS = (
    "OWNER/NAME, OWNER/NAME:Q4_K_M or hf:OWNER/NAME/FILE.gguf, perhaps with @REVISION at the end, or an "
    "address such as hf.co/OWNER/NAME:Q4_K_M"
)


class HubError(UserError):
    """Raised for a wrong name, and for files that the hub does not have or does not give."""


class SeveralModels(HubError):
    """Raised for a name that means more than one model; the message lists them."""


@dataclass(frozen=True)
class HubName:
    """A parsed name of a model on the hub."""

    repo: str  #: OWNER/NAME
    file: str | None = None  #: path in the repository
    quant: str | None = None  #: part of the file's name, if no file is given
    revision: str | None = None  #: None means ``main``

    def __str__(self) -> str:
        rest = f"/{self.file}" if self.file else f":{self.quant}" if self.quant else ""
        return f"{PREFIX}{self.repo}{rest}" + (f"@{self.revision}" if self.revision else "")


def is_hub_name(model: object) -> bool:
    """True if a model is given by its name on the hub, ``hf:...``, or its address there. A local file with
    such a name is ``./hf:...``."""
    if not isinstance(model, str | os.PathLike):
        return False
    text = _text(model)
    return text.startswith(PREFIX) or _ADDRESS.match(text) is not None


def parse(model: str | os.PathLike[str]) -> HubName:
    """Parses a name. ``HubError``: it has none of the allowed forms, or could lead out of its folder."""
    text = _without_address(_text(model))
    match = _NAME.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None or "--" in match["repo"] or ".." in match["repo"]:
        raise HubError(f"{shown(text, 120)} is not the name of a model on the hub: {FORMS} is needed")
    rest, revision = match["rest"], match["revision"]
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise HubError(f"revision {shown(revision, 80)}: a branch, a tag or a commit is needed")
    if rest is None:
        return HubName(match["repo"], revision=revision)
    if rest.endswith(".gguf"):
        if not is_safe(rest):
            raise HubError(f"file {shown(rest, 120)}: a path inside the repository, without .., is needed")
        return HubName(match["repo"], rest, revision=revision)
    after_colon = text[match.end("repo")] == ":"
    if not after_colon or not _QUANT.fullmatch(rest):
        raise HubError(f"{shown(rest, 120)} is neither a .gguf file nor a quantisation: {FORMS} is needed")
    return HubName(match["repo"], quant=rest, revision=revision)


def _without_address(text: str) -> str:
    """The name in an address of the hub; any other text unchanged."""
    address = _ADDRESS.match(text)
    if address is None:
        return text
    name = text[address.end() :].partition("?")[0].partition("#")[0]
    page = _PAGE.fullmatch(name)
    if page is None:
        return name
    file = f"/{page['file']}" if page["file"] else ""
    return page["repo"] + file + (f"@{page['revision']}" if page["revision"] not in (None, "main") else "")


def is_safe(path: str) -> bool:
    """True if a path in a repository is plain: below its folder on every system, and printable."""
    pieces = path.split("/")
    plain = path.isprintable() and not set(path) & set('\\:*?"<>|') and len(path) <= _LONGEST
    return plain and all(
        p not in ("", ".", "..") and p == p.strip() and len(p.encode()) < 256 for p in pieces
    )


def choose(name: HubName, files: Iterable[str]) -> list[str]:
    """The files of the model that a name means, in order: all parts if it is split, then its sidecars.
    ``HubError``: it means no model, or several, which the message lists, or parts are missing."""
    present = sorted(file for file in files if file.endswith(".gguf") and is_safe(file))
    parts = all_parts(choose_first(name, present))
    missing = [part for part in parts if part not in present]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        label = f"{shown(missing[0], 120)}{others}, of the {len(parts)} parts of a model"
        raise HubError(f"{name.repo} has no {label}")
    return parts + [sidecar for sidecar in sidecars(parts[0]) if sidecar in present]


def all_parts(file: str) -> list[str]:
    """The paths of all parts of a split model, from one of them; for a model in one file, only its path."""
    folder, slash, base = file.rpartition("/")
    return [folder + slash + part for part in part_names(base)]


def sidecars(first: str) -> list[str]:
    """Names of files in a model's folder that belong to it."""
    return [first.removesuffix(".gguf") + ending for ending in _SIDECARS]


def is_first(file: str) -> bool:
    """True if a file is a model, or the first part of one."""
    part = part_name(file)
    return not _NO_MODEL.search(file) and (part is None or part[1] == 0)


def choose_first(name: HubName, present: list[str]) -> str:
    """The file that a name means, or one part of a split model. Errors as in :func:`choose`."""
    models = [file for file in present if is_first(file)]
    if name.file is not None:
        if name.file not in present:
            raise HubError(f"{name.repo} has no file {shown(name.file, 120)}: {_listed(models)}")
        return name.file
    meant = models
    if name.quant is not None:
        quant = re.compile(rf"(?<![A-Za-z0-9]){re.escape(name.quant)}(?![A-Za-z0-9_])", re.IGNORECASE)
        meant = [file for file in models if quant.search(file)]
    if len(meant) == 1:
        return meant[0]
    if not meant:
        asked = "GGUF file" if name.quant is None else f"file of quantisation {name.quant}"
        raise HubError(f"{name.repo} has no {asked}: {_listed(models)}")
    example = f"choose one, as in {name.repo}:{_label(meant, 0)}"
    raise SeveralModels(f"{name.repo} has {len(meant)} models: {example}; {_listed(meant)}")


def _listed(models: list[str]) -> str:
    """The available names, on one line."""
    if not models:
        return "it has no .gguf files; a repository of GGUF files is needed"
    labels = [_label(models, number) for number in range(len(models))]
    others = f" and {len(labels) - _LISTED} more" if len(labels) > _LISTED else ""
    return "it has " + ", ".join(shown(label, 80).strip("'") for label in labels[:_LISTED]) + others


def _label(models: list[str], number: int) -> str:
    """The quantisation of a file if no other file has it, else its path."""
    types = [types_in_name[-1] if (types_in_name := _TYPE.findall(file)) else file for file in models]
    return types[number] if types.count(types[number]) == 1 else models[number]


def _text(model: str | os.PathLike[str]) -> str:
    return PurePath(model).as_posix() if isinstance(model, os.PathLike) else model
