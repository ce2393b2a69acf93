"""Texts of calls as terms of a grammar."""

import json
from collections.abc import Iterable, Mapping


class Terms:
    """Converts texts to terms of a grammar, in which names of control tokens are these tokens. :attr:`lines`
    are rules that the terms need. :attr:`notes` list the parts of tools' schemas that are not enforced."""

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self.notes: dict[tuple[str, str], None] = {}  # (tool, part that is not enforced)
        #: long names first, since a name may begin with another one
        self._token_ids = dict(sorted(token_ids.items(), key=lambda each: -len(each[0])))
        self._texts: dict[str, str] = {}

    def is_token(self, text: str) -> bool:
        return text in self._token_ids

    def literal(self, text: str) -> str:
        if not text:
            return ""
        for name, id in self._token_ids.items():
            if name and name in text:
                before, after = text.split(name, 1)
                return " ".join(filter(None, (self.literal(before), f"<[{id}]>", self.literal(after))))
        return self.quoted(text)

    def text_until(self, mark: str) -> str:
        """Returns the term of text without the mark, and the mark. Spaces around the mark do not count."""
        if mark not in self._texts:
            n = len(self._texts)
            name = next((each for each in self._token_ids if each and mark.startswith(each)), None)
            if name is not None:
                self.lines.append(f"TEXT{n}: /(?s:.+)/")
                self._texts[mark] = f"TEXT{n}? {self.literal(mark)}"
            else:
                excluded = f" & ~/(?s:.*){self.escaped(mark.strip())}(?s:.*)/"
                self.lines += [f"TEXT{n}: PART{n} {self.quoted(mark)}", f"PART{n}: /(?s:.*)/{excluded}"]
                self._texts[mark] = f"TEXT{n}"
        return self._texts[mark]

    def other_tokens(self, names: Iterable[str]) -> str:
        """Returns all control tokens except these, as ``1-3,7``."""
        ranges: list[list[int]] = []
        for id in sorted(id for name, id in self._token_ids.items() if name not in set(names)):
            if ranges and ranges[-1][1] == id - 1:
                ranges[-1][1] = id
            else:
                ranges.append([id, id])
        return ",".join(f"{first}-{last}" if first < last else f"{first}" for first, last in ranges)

    @staticmethod
    def quoted(text: str) -> str:
        return json.dumps(text)

    @staticmethod
    def escaped(text: str) -> str:
        """Returns a text for use in a regular expression."""
        return "".join(f"\\x{{{ord(char):x}}}" for char in text)
