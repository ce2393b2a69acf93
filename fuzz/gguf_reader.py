"""Fuzz target: the GGUF reader either refuses a file in one line, or all that the file offers works."""

from __future__ import annotations

from input_file import InputFile

from hotcold.formats.gguf import GGUFError, open_gguf

CORPUS = "gguf"  #: folder of the seeds in tests/corpus

_file = InputFile(".gguf")


def one_input(data: bytes) -> bool:
    """True if the file opens; raises unless it is accepted or refused properly."""
    _file.write(data)
    try:
        with open_gguf(_file.path) as file:
            end = 0
            for info in sorted(file.tensors.values(), key=lambda info: info.offset):
                assert end <= info.offset < info.offset + info.nbytes <= file.size == len(data)
                end = info.offset + info.nbytes
                if info.type.supported:
                    tensor = file.load(info.name)
                    assert tensor.nbytes == info.nbytes and tensor.dequantise().shape == info.shape
                elif info.type.name in ("I8", "I16", "I32", "I64"):
                    assert file.load_integers(info.name).nbytes == info.nbytes
            assert len(file.fingerprint()) == 16
        return True
    except GGUFError as error:
        _file.check_refusal(error)
        return False
