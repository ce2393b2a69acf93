"""Where the entries of a file of ``torch.save`` lie: a zip whose entries are not compressed, of any size."""

import struct

from hotcold.errors import UserError
from hotcold.formats.files import RegularFile
from hotcold.values import shown

# PKWARE's APPNOTE.TXT, sections 4.3.7, 4.3.12 and 4.3.14 to 4.3.16
_END, _ENTRY, _LOCAL = struct.Struct("<4s4H2IH"), struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s22x2H")
_LOCATOR, _END64 = struct.Struct("<4sIQI"), struct.Struct("<4sQ2H2I4Q")
_WIDE = 0xFFFFFFFF  #: of 32 bits, that 64 bits elsewhere count
_WIDE_EXTRA = 1  #: id of the field that has them


class TorchFileError(UserError):
    """A file that is not as ``torch.save`` writes it, or too large."""


#: By name: where an entry's bytes are, and how many.
Entries = dict[str, tuple[int, int]]


def read_archive(file: RegularFile, most_entries: int, most_pickle: int) -> tuple[bytes, Entries]:
    """The pickle, and where the storages are by their keys; TorchFileError: damaged, or more than allowed."""
    entries = _zip_entries(file, most_entries)
    name = next((name for name in entries if name.endswith("/data.pkl")), "")
    at, nbytes = entries.get(name, (0, 0))
    if not 0 < nbytes <= most_pickle:
        raise TorchFileError(f"has {nbytes} bytes of data.pkl: 1 to {most_pickle} are allowed")
    folder = f"{name.removesuffix('.pkl')}/"
    storages = {key.removeprefix(folder): place for key, place in entries.items() if key.startswith(folder)}
    return file.read(at, nbytes), storages


def _zip_entries(file: RegularFile, most: int) -> Entries:
    """TorchFileError: damaged, or more than ``most``."""
    end = file.read(file.size - _END.size, _END.size) if file.size >= _END.size else b""
    if not end.startswith(b"PK\5\6"):
        raise TorchFileError("is no zip, or cut short: torch.save of version 1.6 or later is needed")
    count, nbytes, start = _wide_end(file) or _END.unpack(end)[4:7]
    if count > most or nbytes > count << 10 or start + nbytes > file.size:
        raise TorchFileError(f"its zip lists {count} entries in {nbytes} bytes at {start}: it is damaged")
    listing, found, at = file.read(start, nbytes), {}, 0
    for _ in range(count):
        entry = _ENTRY.unpack(listing[at : at + _ENTRY.size].ljust(_ENTRY.size, b"\0"))
        names = at + _ENTRY.size
        name = listing[names:][: entry[10]].decode("ascii", "replace")
        extra = listing[names + entry[10] :][: entry[11]]
        size, offset = _wide_numbers((entry[9], entry[8], entry[16]), extra)
        if entry[4] or entry[3] & 1:
            raise TorchFileError(f"entry {shown(name)} is compressed or encrypted: torch.save does neither")
        local = _LOCAL.unpack(file.read(offset, _LOCAL.size)) if offset + _LOCAL.size <= file.size else [b""]
        data = offset + _LOCAL.size + sum(local[1:])
        if entry[0] != b"PK\1\2" or local[0] != b"PK\3\4" or data + size > file.size:
            raise TorchFileError(f"entry {shown(name)} is damaged, or reaches past the end of the file")
        found[name], at = (data, size), names + sum(entry[10:13])
    return found


def _wide_end(file: RegularFile) -> tuple[int, int, int] | None:
    """Count, bytes and start of the listing where the file has them in 64 bits."""
    at = file.size - _END.size - _LOCATOR.size
    if at < 0:
        return None
    mark, _, place, _ = _LOCATOR.unpack(file.read(at, _LOCATOR.size))
    if mark != b"PK\6\7" or place + _END64.size > file.size:
        return None
    end = _END64.unpack(file.read(place, _END64.size))
    return end[7:10] if end[0] == b"PK\6\6" else None


def _wide_numbers(numbers: tuple[int, int, int], extra: bytes) -> tuple[int, int]:
    """Size and offset of an entry. Of those and its compressed size, what 32 bits do not hold is in a field
    of its own, in order."""
    at, wide = 0, b""
    while at + 4 <= len(extra):
        id, nbytes = struct.unpack_from("<2H", extra, at)
        if id == _WIDE_EXTRA:
            wide = extra[at + 4 : at + 4 + nbytes]
        at += 4 + nbytes
    result = []
    for number in numbers:
        if number == _WIDE and len(wide) >= 8:
            number, wide = int.from_bytes(wide[:8], "little"), wide[8:]
        result.append(number)
    return result[0], result[2]
