"""How the cpu backend lays weights out in memory (csrc/simd/types.h), stated in NumPy without care for
speed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hotcold.formats.blocks import Tensor

Bytes = npt.NDArray[np.uint8]

LANES = 16  #: blocks of 32 weights in a group
UNITS = {"Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q6_K": 6, "Q8_0": 8}  #: words of 4 bytes per 32 codes; else 4
NIBBLES_AT = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8, "IQ4_NL": 2, "MXFP4": 1, "Q4_K": 16, "Q5_K": 48}


def packed_rows(tensor: Tensor) -> bytes:
    """Each row: the scales of all its blocks, then their codes."""
    name = tensor.type.name
    if tensor.type.weights == 1:
        return tensor.data.tobytes()
    parts = []
    for data in tensor.data:
        blocks = data.reshape(-1, tensor.type.nbytes)
        if not tensor.type.panels:
            parts += _opened_row(name, blocks)
            continue
        parts += _row_header(name, blocks)
        parts.append(_lanes(name, _codes(name, blocks).reshape(-1, 32)))
    return b"".join(parts)


def _opened_row(name: str, blocks: Bytes) -> list[bytes]:
    """Rows that are opened, a group at a time: some lie as in the file, some by scales and lanes."""
    if name == "Q2_K":
        header = [blocks[:, 80:82], blocks[:, 82:84], blocks[:, :16:2], blocks[:, 1:16:2]]
        codes = _pairs(blocks[:, 16:80])
    elif name == "Q3_K":
        low, two = blocks[:, 96:104], blocks[:, 104:108]
        four = np.hstack([low & 15, low >> 4])
        high = np.hstack([two & 3, two >> 2 & 3, two >> 4 & 3, two >> 6])
        nibbles = high[:, ::2] | high[:, 1::2] << 2
        header = [blocks[:, 108:], four[:, ::2] | four[:, 1::2] << 4, nibbles[:, ::2] | nibbles[:, 1::2] << 4]
        bits = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
        codes = _pairs(blocks[:, 32:96]) | bits.reshape(len(blocks), -1) << 2
    elif name == "IQ4_XS":
        header = [blocks[:, :2], blocks[:, 2:4], blocks[:, 4:8]]
        codes = (blocks[:, 8:].reshape(-1, 8, 1, 16) >> np.array([[0], [4]], np.uint8) & 15).reshape(-1, 256)
    elif name == "TQ2_0":
        header, codes = [blocks[:, 64:]], _pairs(blocks[:, :64])
    else:
        return [blocks.tobytes()]
    return [*(part.tobytes() for part in header), _lanes(name, codes.reshape(-1, 32))]


def _pairs(packed: Bytes) -> Bytes:
    """Codes of two bits: each 32 bytes hold 32 codes in their lowest bits, then 32 in the next ones, ..."""
    runs = packed.reshape(-1, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    return runs.reshape(-1, 256)


def packed_panels(tensor: Tensor) -> bytes:
    """``(D, N)``, a panel for each block's worth of neurons: scales of all outputs, a row of codes each."""
    name, dim = tensor.type.name, tensor.shape[0]
    outputs = -(-dim // 32) * 32
    data = np.zeros((outputs, *tensor.data.shape[1:]), np.uint8)
    data[:dim] = tensor.data
    # Scales lie as codes do: in groups of 16 blocks of 32, and in a group block by block for each element.
    order = np.arange(outputs).reshape(-1, 32)
    order = np.concatenate([order[g : g + LANES].T.ravel() for g in range(0, len(order), LANES)])
    parts = []
    for blocks in data.reshape(outputs, -1, tensor.type.nbytes).transpose(1, 0, 2):
        parts += _panel_header(name, blocks[order])
        parts += [_lanes(name, neuron.reshape(-1, 32)) for neuron in _codes(name, blocks).T]
    return b"".join(parts)


def _lanes(name: str, codes: Bytes) -> bytes:
    """Blocks of 32 codes in groups: unit 0 of every block of the group, then unit 1, ..."""
    units = _units(name, codes)
    return b"".join(units[g : g + LANES].transpose(1, 0, 2).tobytes() for g in range(0, len(units), LANES))


def _units(name: str, codes: Bytes) -> Bytes:
    """``[blocks, 32]`` codes as ``[blocks, units, 4]`` bytes."""
    if name == "Q8_0":
        return codes.reshape(-1, 8, 4)
    if name in ("Q2_K", "Q3_K", "TQ2_0"):
        words = codes.reshape(-1, 2, 4, 4)
        shifts = np.arange(4, dtype=np.uint8)[:, None]
        low = np.bitwise_or.reduce((words & 3) << 2 * shifts, axis=2)
        bits = (words >> 2).reshape(-1, 8, 4) << np.arange(8, dtype=np.uint8)[:, None]
        third = np.bitwise_or.reduce(bits, axis=1, keepdims=True)
        return np.concatenate([low, third], axis=1) if name == "Q3_K" else low
    units = np.zeros((len(codes), UNITS.get(name, 4), 4), np.uint8)
    units[:, :4] = (codes[:, :16] & 15 | codes[:, 16:] << 4).reshape(-1, 4, 4)
    high = (codes >> 4).reshape(-1, 8, 4)
    for word in range(8):
        if name == "Q6_K":
            units[:, 4 + word // 4] |= high[:, word] << 2 * (word % 4)
        elif name in UNITS:
            units[:, 4] |= high[:, word] << word
    return units


def _codes(name: str, blocks: Bytes) -> Bytes:
    """``[blocks, weights]``, in the order of the weights."""
    if name == "Q8_0":
        return blocks[:, 2:]
    if name == "Q6_K":
        halves = []
        for half in range(2):
            low, high = blocks[:, 64 * half :][:, :64], blocks[:, 128 + 32 * half :][:, :32]
            nibbles = (low[:, :32] & 15, low[:, 32:] & 15, low[:, :32] >> 4, low[:, 32:] >> 4)
            halves += [each | (high >> 2 * q & 3) << 4 for q, each in enumerate(nibbles)]
        return np.concatenate(halves, axis=1)
    at, width = NIBBLES_AT[name], 32 if name.endswith("_K") else 16
    nibbles = blocks[:, at:].reshape(len(blocks), -1, 1, width) >> np.array([[0], [4]], np.uint8) & 15
    codes = nibbles.reshape(len(blocks), -1)
    if name in ("Q5_0", "Q5_1"):
        codes |= np.unpackbits(blocks[:, at - 4 : at], axis=1, bitorder="little") << 4
    if name == "Q5_K":
        for run in range(8):
            codes[:, 32 * run : 32 * run + 32] |= (blocks[:, 16:48] >> run & 1) << 4
    return codes


def _scales(name: str, blocks: Bytes) -> list[bytes]:
    """The scales of all blocks, then their minima."""
    at, size = (208 if name == "Q6_K" else 0), (1 if name == "MXFP4" else 2)
    scales = [blocks[:, at : at + size].tobytes()]
    if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        scales.append(blocks[:, 2:4].tobytes())
    return scales


def _six_bits(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """Scales of Q4_K and Q5_K, for the 8 runs of each block: low nibbles of scale and minimum in a byte, and
    the two high bits of both in a nibble."""
    first, second, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.hstack([first & 63, mixed & 15 | first >> 6 << 4])
    minima = np.hstack([second & 63, mixed >> 4 | second >> 6 << 4])
    return scales & 15 | minima << 4, scales >> 4 | minima >> 4 << 2


def _row_header(name: str, blocks: Bytes) -> list[bytes]:
    header = _scales(name, blocks)
    if name == "Q6_K":
        header += [blocks[:, 192:208:2].tobytes(), blocks[:, 193:208:2].tobytes()]
    elif name.endswith("_K"):
        low, high = _six_bits(blocks)
        header += [low.tobytes(), (high[:, ::2] | high[:, 1::2] << 4).tobytes()]
    return header


def _panel_header(name: str, blocks: Bytes) -> list[bytes]:
    header = _scales(name, blocks)
    if name == "Q6_K":
        header.append(blocks[:, 192:208].T.tobytes())
    elif name.endswith("_K"):
        low, high = _six_bits(blocks)
        header += [low.T.tobytes(), (high[:, ::2] | high[:, 1::2] << 4).T.tobytes()]
    return header
