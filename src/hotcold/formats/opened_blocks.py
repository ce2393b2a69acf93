"""Opens blocks of weights that are codes of a few bits, or values from a table, times scales."""

import numpy as np

from hotcold.formats.fields import Bytes, Floats, Opened, fields, half_at

IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
#: twice the values of a 4-bit float (E2M1)
FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def open_q3_k(blocks: Bytes) -> Opened:
    """Codes from -4, whose highest bits come first; 16 scales of 6 bits count from -32."""
    low, high = fields(blocks[:, 96:104], 4, 8), fields(blocks[:, 104:108], 2, 4)
    scales: Floats = half_at(blocks, 108) * ((low | high << 4).view(np.int8) - np.int8(32))
    codes = fields(blocks[:, 32:96], 2, 32) | fields(blocks[:, :32], 1, 32) << 2
    return scales, codes.view(np.int8) - np.int8(4)


def open_iq4_xs(blocks: Bytes) -> Opened:
    """8 groups of IQ4_NL's codes, with scales of 6 bits that count from -32."""
    low, high = fields(blocks[:, 4:8], 4, 1), fields(blocks[:, 2:4], 2, 1)
    scales: Floats = half_at(blocks, 0) * ((low | high << 4).view(np.int8) - np.int8(32))
    return scales, IQ4_NL[fields(blocks[:, 8:], 4, 16)]


def open_tq1_0(blocks: Bytes) -> Opened:
    """Codes -1, 0 and 1 as digits to base 3: a byte is the first 8 bits of a fraction."""
    runs = []
    for start, end, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = (3 ** np.arange(digits)).astype(np.uint8)[:, None]
        fractions = (blocks[:, None, start:end] * powers).astype(np.uint16)
        runs.append((fractions * 3 >> 8).reshape(len(blocks), -1).astype(np.int8) - np.int8(1))
    return half_at(blocks, 52), np.hstack(runs)


def open_tq2_0(blocks: Bytes) -> Opened:
    return half_at(blocks, 64), fields(blocks[:, :64], 2, 32).view(np.int8) - np.int8(1)


def open_nvfp4(blocks: Bytes) -> Opened:
    """Runs of 16, each with a float of 8 bits without sign (E4M3) as its scale."""
    code = blocks[:, :4].astype(np.int32)
    exponent, fraction = code >> 3 & 15, code & 7
    # Half of each, since the table has doubled values.
    scales = np.ldexp(np.where(exponent == 0, fraction, fraction + 8), np.maximum(exponent, 1) - 11)
    scales = np.where(code == 0x7F, 0, scales).astype(np.float32)
    return scales, FP4[fields(blocks[:, 4:], 4, 8)]


def open_q1_0(blocks: Bytes) -> Opened:
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").view(np.int8)
    return half_at(blocks, 0), bits * np.int8(2) - np.int8(1)


def open_q2_0(blocks: Bytes) -> Opened:
    """Codes of two bits, four neighbours in a byte, count from -1."""
    codes = blocks[:, 2:, None] >> np.arange(0, 8, 2, dtype=np.uint8) & np.uint8(3)
    return half_at(blocks, 0), codes.reshape(len(blocks), -1).view(np.int8) - np.int8(1)
