"""Reads a model file for the front of an engine process: everything except its tensors."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from hotcold.formats.gguf import open_gguf
from hotcold.hosting.state import ModelInfo
from hotcold.runtime.named_templates import with_template
from hotcold.runtime.sampling import SamplingParams, sampling_of_file
from hotcold.tokenizer.tokenizer import Tokenizer

TEMPLATE = "tokenizer.chat_template"
_TITLE = "general.name"


@dataclass(frozen=True, eq=False)
class ModelFile:
    metadata: Mapping[str, Any]
    tokenizer: Tokenizer
    fingerprint: str
    params: int
    size_bytes: int
    created: int  #: time of the last change, in seconds since 1970

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters that the file recommends."""
        return sampling_of_file(self.metadata)[0]

    @classmethod
    def read(cls, path: Path, chat_template: str | None = None) -> Self:
        """Reads a file; ``chat_template`` replaces its own. Raises UserError if it is not a model file, or if
        its vocabulary is not supported."""
        with open_gguf(path) as file:
            return cls(
                metadata=with_template(file.metadata, chat_template),
                tokenizer=Tokenizer.from_metadata(file.metadata),
                fingerprint=file.fingerprint(),
                params=sum(math.prod(info.shape) for info in file.tensors.values()),
                size_bytes=file.size,
                created=int(os.stat(path).st_mtime),
            )

    def complete(self, info: ModelInfo) -> ModelInfo:
        """Completes an engine process's facts about its model from the file."""
        title, template = self.metadata.get(_TITLE), self.metadata.get(TEMPLATE)
        return replace(
            info,
            params=self.params,
            size_bytes=self.size_bytes,
            created=self.created,
            title=title if isinstance(title, str) else None,
            template=template if isinstance(template, str) else None,
        )
