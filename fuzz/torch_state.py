"""Fuzz target: the reader of state dicts refuses a file in one line, or gives tensors of its bytes."""

from __future__ import annotations

from input_file import InputFile

from hotcold.formats.torch_entries import TorchFileError
from hotcold.formats.torch_state import TorchState

CORPUS = "torch_state"  #: folder of the seeds in tests/corpus

_file = InputFile(".bin")


def one_input(data: bytes) -> bool:
    """Whether the file is read; what is neither that nor a proper refusal raises."""
    _file.write(data)
    try:
        state = TorchState(_file.path)
        for name, tensor in state.tensors.items():
            values = state.read(name)
            assert values.shape == tensor.shape and values.nbytes < len(data)
        return True
    except TorchFileError as error:
        _file.check_refusal(error)
        return False
