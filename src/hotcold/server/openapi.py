"""Makes the server's OpenAPI 3.1 description from the tables with which requests are read."""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from hotcold.server.protocol import chat, completion, native, tokens
from hotcold.server.protocol.fields import NUMBER, Field, Fields, Neutral, Schema, Shape
from hotcold.version import __version__

Document: TypeAlias = dict[str, Any]

_STRING: Schema = {"type": "string"}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_OBJECT: Schema = {"type": "object"}
_MOMENT: Schema = {"type": "integer", "description": "Unix time, in seconds."}


def _object(properties: dict[str, Schema], optional: tuple[str, ...] = ()) -> Schema:
    """The schema of an object; all properties are required except the optional ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_TOKEN = {"token": _STRING, "logprob": _NUMBER, "bytes": _list(_COUNT)}
_PIECE: Schema = {"anyOf": [_STRING, _list(_COUNT)]}
_LOGPROBS = _object(
    {
        "content": _list(_object({**_TOKEN, "top_logprobs": _list(_object(_TOKEN))})),
        "refusal": {"type": "null"},
    }
)
_CALL = _object(
    {
        "id": _STRING,
        "type": {"const": "function"},
        "function": _object({"name": _STRING, "arguments": _STRING}),
    }
)
_MESSAGE = _object(
    {
        "role": {"const": "assistant"},
        "content": _TEXT_OR_NULL,
        "refusal": {"type": "null"},
        "reasoning_content": _STRING,
        "tool_calls": _list(_CALL),
    },
    optional=("reasoning_content", "tool_calls"),
)
_HEAD = {"id": _STRING, "created": _MOMENT, "model": _STRING, "system_fingerprint": _STRING}
_COLUMNS = _object(
    {
        "tokens": _list(_STRING),
        "token_logprobs": _list({"type": ["number", "null"]}),
        "top_logprobs": _list(_or_null({"type": "object", "additionalProperties": _NUMBER})),
        "text_offset": _list(_COUNT),
    }
)
_REPLIES: dict[str, Schema] = {
    "Error": _object(
        {
            "error": _object(
                {"message": _STRING, "type": _STRING, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL}
            )
        }
    ),
    "Usage": _object(
        {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
            "completion_tokens_details": _object({"reasoning_tokens": _COUNT}),
        }
    ),
    "ChatReply": _object(
        {
            **_HEAD,
            "object": {"const": "chat.completion"},
            "choices": _list(
                _object(
                    {
                        "index": _COUNT,
                        "message": _MESSAGE,
                        "logprobs": _or_null(_LOGPROBS),
                        "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
                    }
                )
            ),
            "usage": _ref("Usage"),
            "timings": _OBJECT,
        }
    ),
    "CompletionReply": _object(
        {
            **_HEAD,
            "object": {"const": "text_completion"},
            "choices": _list(
                _object(
                    {
                        "index": _COUNT,
                        "text": _STRING,
                        "logprobs": _or_null(_COLUMNS),
                        "finish_reason": {"enum": ["stop", "length"]},
                    }
                )
            ),
            "usage": _ref("Usage"),
            "timings": _OBJECT,
        }
    ),
    "NativeReply": _object(
        {
            "content": _STRING,
            "tokens": _list(_COUNT),
            "stop": {"const": True},
            "stop_type": {"enum": ["eos", "limit", "word"]},
            "stopping_word": _STRING,
            "tokens_predicted": _COUNT,
            "tokens_evaluated": _COUNT,
            "generation_settings": _OBJECT,
            "timings": _OBJECT,
        }
    ),
    "Tokens": _object({"tokens": _list({"anyOf": [_COUNT, _object({"id": _COUNT, "piece": _PIECE})]})}),
    "Content": _object({"content": _STRING}),
    "Model": _object(
        {
            "id": _STRING,
            "object": {"const": "model"},
            "created": _MOMENT,
            "owned_by": _STRING,
            "aliases": _list(_STRING),
            "meta": _OBJECT,
        }
    ),
    "Models": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
    "Anything": _OBJECT,
}


@dataclass(frozen=True)
class Operation:
    """A route, which exists with and without ``/v1`` before its path."""

    method: str
    path: str
    summary: str
    reply: str  #: name of the reply's schema; empty: text
    body: str = ""  #: name of the body's schema
    fields: Fields | None = None  #: fields of the body
    streams: bool = False
    public: bool = False  #: true if it needs no key

    @property
    def name(self) -> str:
        words = self.path.replace("/v1", "").replace("{", "").replace("}", "").split("/")
        return "_".join([self.method.lower(), *filter(None, words)]).replace(".", "_")


OPERATIONS = (
    Operation("GET", "/health", "Whether requests are taken", "Anything", public=True),
    Operation("GET", "/metrics", "Counters, for Prometheus", ""),
    Operation("GET", "/openapi.json", "This description", "Anything"),
    Operation("GET", "/props", "The server's settings, as in llama.cpp", "Anything"),
    Operation("GET", "/v1/models", "The model that is served", "Models"),
    Operation("GET", "/v1/models/{name}", "One model", "Model"),
    Operation(
        "POST", "/v1/chat/completions", "Continue a conversation", "ChatReply",
        "ChatRequest", chat.FIELDS, streams=True,
    ),
    Operation(
        "POST", "/v1/completions", "Continue texts", "CompletionReply",
        "CompletionRequest", completion.FIELDS, streams=True,
    ),
    Operation(
        "POST", "/completion", "Continue a text, as in llama.cpp", "NativeReply",
        "NativeRequest", native.FIELDS, streams=True,
    ),
    Operation("POST", "/tokenize", "The tokens of a text", "Tokens", "TokenizeRequest", tokens.TOKENIZE),
    Operation("POST", "/detokenize", "The text of tokens", "Content", "DetokenizeRequest", tokens.DETOKENIZE),
)  # fmt: skip


@cache
def document() -> Document:
    """The document for ``/openapi.json``; callers must not change it."""
    bodies = {each.body: Shape(each.fields).schema() for each in OPERATIONS if each.fields is not None}
    paths: Document = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Hotcold",
            "version": __version__,
            "description": "What OpenAI's and llama.cpp's clients expect of a server for one language model. "
            "Fields that are not listed are ignored; null is the same as leaving a field out.",
        },
        "paths": paths,
        "components": {
            "schemas": {**bodies, **_REPLIES},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(each: Operation) -> Document:
    content: Document = {}
    if each.reply:
        content["application/json"] = {"schema": _ref(each.reply)}
    else:
        content["text/plain"] = {"schema": _STRING}
    if each.streams:
        content["text/event-stream"] = {"schema": _STRING}
    error = {"application/json": {"schema": _ref("Error")}}
    found: Document = {
        "operationId": each.name,
        "summary": each.summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "4XX": {"description": "What is wrong with the request.", "content": error},
            "503": {"description": "Not now: see Retry-After.", "content": error},
        },
    }
    if each.public:
        found["security"] = []
        found["responses"]["503"]["content"] = {"application/json": {"schema": _OBJECT}}
    if each.body:
        body = {"application/json": {"schema": _ref(each.body)}}
        found["requestBody"] = {"required": True, "content": body}
    if "{name}" in each.path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": _STRING}]
    return found


def table(fields: Fields) -> str:
    """The fields of a body as a table in Markdown: names, values, defaults and notes. A line after it lists
    the fields that are refused unless they ask for nothing."""
    lines = ["| field | values | default | |", "|---|---|---|---|"]
    refused = []
    for name, field in fields.items():
        if isinstance(field.kind, Neutral):
            allowed = ", ".join(f"`{json.dumps(each)}`" for each in field.kind.allowed)
            refused.append(f"`{name}`{f' ({allowed})' if allowed else ''}")
        else:
            default = "required" if field.required else _shown(field)
            lines.append(f"| `{name}` | {_values(field.kind.schema())} | {default} | {field.note} |")
    if refused:
        lines += ["", f"Refused, but for the values in brackets: {', '.join(refused)}."]
    return "\n".join(lines)


def _shown(field: Field) -> str:
    return "" if field.default is None else f"`{json.dumps(field.default)}`"


def _values(schema: Schema) -> str:
    """The allowed values in a few words. Numbers and truth values may also be text: the page says so once."""
    if "anyOf" in schema:
        kinds = [each for each in schema["anyOf"] if NUMBER not in each.get("pattern", "")]
        schema = {**schema, "anyOf": kinds} if len(kinds) > 1 else kinds[0]
    if "anyOf" in schema:
        found = [_values(each) for each in schema["anyOf"]]
        if sum(each.startswith("list") for each in found) > 1:
            found = [each.partition(",")[0] for each in found]
        return " or ".join(dict.fromkeys(found))
    if any(each is True for each in schema.get("enum", ())):
        return "true, false"
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if "minimum" in schema:
        low, high = (_power(schema[bound]) for bound in ("minimum", "maximum"))
        return f"{low} to {high}" + (f", not {schema['not']['const']}" if "not" in schema else "")
    if schema.get("type") == "array":
        return f"list, up to {schema['maxItems']}"
    if "oneOf" in schema or schema.get("type") in ("object", ["object", "boolean"]):
        return "object"
    return {"string": "text"}[schema["type"]]


def _power(bound: float) -> str:
    """A bound in words; large ones are powers of two, or one less."""
    for each, less in ((bound, ""), (bound + 1, " - 1")):
        if (isinstance(each, int) and abs(each) > 1 << 19 and each & (each - 1) == 0) or each == -(1 << 63):
            return f"{'-' if each < 0 else ''}2^{abs(int(each)).bit_length() - 1}{less}"
    return f"{bound:g}"
