"""Short forms of JSON Schemas for the description of replies."""

from hotcold.server.protocol.fields import Schema

STRING: Schema = {"type": "string"}
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
OBJECT: Schema = {"type": "object"}
MOMENT: Schema = {"type": "integer", "description": "Unix time, in seconds."}


def object_of(properties: dict[str, Schema], optional: tuple[str, ...] = ()) -> Schema:
    """Returns the schema of an object; all properties are required except the optional ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
