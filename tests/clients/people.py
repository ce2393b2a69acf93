"""The data that clients are to read from a text. Needs pydantic, as they do."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class City(BaseModel):
    name: str = Field(max_length=20)
    country: str | None = Field(default=None, max_length=20)


class Person(BaseModel):
    """Someone whom a text speaks of."""

    name: str = Field(description="The first name", max_length=20)
    age: int = Field(ge=0, le=150)
    kind: Literal["person", "robot"] = "person"
    home: City | None = None
