"""Fuzz target: the reader of torch.save's files refuses one in one line, or gives tensors of its bytes."""

from __future__ import annotations

from input_file import InputFile

from hotcold.formats.torch_file import TorchFileError, TorchState, read_vector

CORPUS = "torch_file"  #: folder of the seeds in tests/corpus

_file = InputFile(".bin")


def one_input(data: bytes) -> bool:
    """True if the file is read in either way; raises unless it is accepted or refused properly."""
    _file.write(data)
    accepted = False
    for read in (_read_state, _read_vector):
        try:
            read(data)
            accepted = True
        except TorchFileError as error:
            _file.check_refusal(error)
    return accepted


def _read_state(data: bytes) -> None:
    state = TorchState(_file.path)
    for name, tensor in state.tensors.items():
        values = state.read(name)
        assert values.shape == tensor.shape and values.nbytes < len(data)


def _read_vector(data: bytes) -> None:
    vector = read_vector(_file.path)
    assert vector.ndim == 1 and 0 < vector.nbytes < len(data)
