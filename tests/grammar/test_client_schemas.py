"""Schemas as clients' libraries write them: each allows and refuses what another validator does."""

from __future__ import annotations

import datetime
import enum
import json
import random
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from support.vocabulary_of_bytes import matches, random_answer

from hotcold.grammar.json_schema import lark_of_schema, read

STORED = json.loads(Path(__file__).parents[1].joinpath("data/schemas/clients.json").read_text("utf-8"))


@pytest.mark.parametrize("case", STORED, ids=lambda case: case["by"])
def test_stored_schemas(case: dict[str, Any]) -> None:
    check(case["schema"], case["right"], case["wrong"], case["notes"])


def check(schema: dict[str, Any], right: list[Any], wrong: list[Any], notes: list[str]) -> None:
    found = read(schema)
    assert list(found.notes) == notes
    assert read(found.schema).schema == found.schema
    grammar = lark_of_schema(json.dumps(schema))
    valid = pytest.importorskip("jsonschema_rs").validator_for(schema, validate_formats=True).is_valid
    for value in right:
        assert valid(value), value
        assert matches(grammar, json.dumps(value, ensure_ascii=False)), value
        assert matches(grammar, json.dumps(value, indent=2, ensure_ascii=False)), value
        if isinstance(value, dict):
            assert not matches(grammar, json.dumps({**value, "invented": 1}))
    for value in wrong:
        assert not valid(value), value
        assert not matches(grammar, json.dumps(value)), value
    if not notes and "nullable" not in json.dumps(schema):
        draw = random.Random(0)
        texts = [text for _ in range(3) if (text := random_answer(grammar, draw, 300)) is not None]
        assert [text for text in texts if not valid(json.loads(text))] == []


def test_models_of_pydantic() -> None:
    pydantic = pytest.importorskip("pydantic")
    Field = pydantic.Field

    class Color(enum.Enum):
        red = "red"
        blue = 2

    class Cat(pydantic.BaseModel):
        """Purrs."""

        kind: Literal["cat"]
        lives: Annotated[int, Field(ge=0, le=9)] = 9

    class Dog(pydantic.BaseModel):
        kind: Literal["dog"]
        tricks: set[str] = Field(default_factory=set)

    class Owner(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(extra="forbid", regex_engine="python-re")
        pet: Cat | Dog = Field(discriminator="kind")
        home: Path | None = None
        secret: pydantic.SecretStr | None = None
        color: Color = Color.red
        day: datetime.date | None = None
        code: Annotated[str, Field(pattern=r"^(?!0)[0-9]{2}$")] = "12"
        pair: tuple[int, str] = (1, "a")
        money: Decimal | None = None
        id: UUID | None = None
        more: dict[str, float] = Field(default_factory=dict)
        friends: list[Owner] = Field(default_factory=list)

    schema = Owner.model_json_schema()
    right = [
        {"pet": {"kind": "cat", "lives": 3}},
        {"pet": {"kind": "dog", "tricks": ["sit"]}, "home": "/x", "color": 2, "day": "2024-02-29",
         "code": "12", "pair": [1, "b"], "more": {"a": 0.5}, "friends": [{"pet": {"kind": "cat"}}]},
    ]  # fmt: skip
    wrong: list[Any] = [
        {}, {"pet": {"kind": "cow"}}, {"pet": {"kind": "cat", "lives": 10}},
        {"pet": {"kind": "cat"}, "pair": [1]}, {"pet": {"kind": "cat"}, "color": "green"},
    ]  # fmt: skip
    notes = ["pattern at $defs.Owner.properties.code", "uniqueItems at $defs.Dog.properties.tricks"]
    check(schema, right, wrong, notes)
    for value in right:
        Owner.model_validate(value)
