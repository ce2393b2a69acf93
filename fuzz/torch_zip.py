"""Fuzz target: the reader of torch.save's files refuses one in one line, or gives a vector of its bytes."""

from __future__ import annotations

from input_file import InputFile

from hotcold.formats.torch_zip import TorchFileError, read_vector

CORPUS = "torch_zip"  #: folder of the seeds in tests/corpus

_file = InputFile(".pt")


def one_input(data: bytes) -> bool:
    """Whether the file is read; what is neither that nor a proper refusal raises."""
    _file.write(data)
    try:
        vector = read_vector(_file.path)
        assert vector.ndim == 1 and 0 < vector.nbytes < len(data) and vector.tobytes() in data
        return True
    except TorchFileError as error:
        _file.check_refusal(error)
        return False
