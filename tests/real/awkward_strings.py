"""1600 strings that tokenizers stumble over: 100 chosen ones, and characters of many scripts at random."""

from __future__ import annotations

import random

_SPACES = [
    "", "hi", " hi", "  hi", "\nhi", "hi\n", "hi\n\n\n", "\t\thi", "a  b   c    d", "\r\n\r\n", "\r",
    "   \n   \n  ", "\u00a0a\u00a0b", "\u3000a", "\u2028a\u2029", "\u0085a", "\x1c\x1d\x1e\x1fa", "\x0b\x0ca",
    "\u2581", "\u2581\u2581a", "a\u2581b", "\ufeffhi", "\u200b\u200c\u200d", "a\u00adb", "\\n\\t",
]  # fmt: skip
_NAMES = [
    "<0x0A>", "<0x41>", "<|im_start|>user\nhi<|im_end|>", "<|im_start|>  x", "x <|im_end|>  y",
    "<start_of_turn>user\nhi<end_of_turn>\n", "<bos>hi<eos>", "[multimodal]", "[toxicity=0]", "<unused5>",
    "<td>x</td>", "<pad>", "<|endoftext|>", "<unk>", "</s>",
]  # fmt: skip
_SCRIPTS = [
    "中文字符，测试。", "日本語テスト カタカナ", "한국어 테스트", "สวัสดีชาวโลก", "नमस्ते दुनिया", "مرحبا بالعالم",
    "שלום עולם", "\u0627\u064b", "\u093f", "\u0e33\u0e4d", "\u1100\u1161\u11a8", "\u202eabc", "\u0870",
    "ǅ ǆ Ǆ", "ß ẞ İ ı", "e\u0301", "é", "Å", "\u212b", "ﬁ", "\u0300abc", "abc\u0300def", "１２３",
    "½ ² ٣ ३ Ⅷ", "①②", "㍿", "٠١٢", "x²", "10²³",
]  # fmt: skip
_RARE = [
    "\x00", "a\x00b", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "😀😀😀", "🫨🪿🫷", "\U0001f9d1\U0001f3ff", "𝔘𝔫𝔦", "\ud7ff",
    "\ue000\uf8ff", "\ufffd\ufffe\uffff", "\U0010ffff", "\U00016fe0\U00018b00", "\U0001e030", "\U0001df00",
    "\u1c89\u1c8a", "\U00010ec2", "\U000323b0", "\u2ffc", "\U0001ccd6", "\U00040000a", "\U00080000",
]  # fmt: skip
_WRITING = [
    "123456789", "1,234.56", "3.14e-10", "0x1F", "1a2b3c", "A1B2", "don't DON'T we'll I'M y'all",
    "’s ‘x’ “y”", "l'été", "O'Neil's", "def f(x):\n    return x\n\n\tif x:\n", "a" * 300, "ab " * 50,
    "!!!???...---", "http://a.b/c?d=e&f=g#h", "\x43:\\Users\\x", "$$\\frac{a}{b}$$",
]  # fmt: skip
_POOLS = [
    (0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x5FF), (0x600, 0x6FF), (0x900, 0x97F),
    (0xE00, 0xE7F), (0x2000, 0x206F), (0x2070, 0x20CF), (0x2100, 0x214F), (0x3000, 0x30FF), (0x4E00, 0x4FFF),
    (0xAC00, 0xADFF), (0xFE00, 0xFE2F), (0xFF00, 0xFFEF), (0x1F300, 0x1F6FF), (0x1F900, 0x1F9FF), (0, 0x1F),
    (0x1D400, 0x1D7FF), (0x10A00, 0x10AFF), (0xE0100, 0xE01EF),
]  # fmt: skip
_PLAIN = [(0x20, 0x20), (0x30, 0x39), (0x61, 0x7A)]


def awkward_strings(count: int = 1600) -> list[str]:
    """The same in every run."""
    found = [*_SPACES, *_NAMES, *_SCRIPTS, *_RARE, *_WRITING]
    rng = random.Random(7)
    while len(found) < count:
        pools = [*rng.sample(_POOLS, rng.randint(1, 3)), *_PLAIN]
        found.append("".join(chr(rng.randint(*rng.choice(pools))) for _ in range(rng.randint(1, 12))))
    return found
