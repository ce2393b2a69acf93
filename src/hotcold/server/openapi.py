"""The server's OpenAPI 3.1 description, made from the tables that validate requests."""

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from hotcold.server.protocol import (
    anthropic,
    chat,
    completion,
    embeddings,
    infill,
    native,
    ollama,
    ollama_embeddings,
    props,
    responses,
    tokens,
)
from hotcold.server.protocol.fields import NUMBER, Field, Fields, Neutral, Schema, Shape
from hotcold.server.reply_schemas import REPLIES
from hotcold.server.schema_kinds import OBJECT, STRING, ref
from hotcold.version import __version__

Document: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Operation:
    """A route. It exists with and without ``/v1`` before its path."""

    method: str
    path: str
    summary: str
    reply: str  #: name of the reply's schema; empty: text
    body: str = ""  #: name of the body's schema
    fields: Fields | None = None  #: fields of the body
    streams: bool = False
    stream: str = "text/event-stream"  #: content type of its streams
    error: str = "Error"  #: name of the schema of its errors
    public: bool = False  #: true if it needs no key

    @property
    def name(self) -> str:
        words = self.path.replace("/v1", "").replace("{", "").replace("}", "").split("/")
        return "_".join([self.method.lower(), *filter(None, words)]).replace(".", "_").replace("-", "_")


OPERATIONS = (
    Operation("GET", "/health", "Whether the server accepts requests", "Anything", public=True),
    Operation("GET", "/metrics", "Metrics, for Prometheus", ""),
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
        "POST", "/v1/embeddings", "Embeddings of texts", "EmbeddingsReply",
        "EmbeddingsRequest", embeddings.FIELDS,
    ),
    Operation(
        "POST", "/completion", "Continue a text, as in llama.cpp", "NativeReply",
        "NativeRequest", native.FIELDS, streams=True,
    ),
    Operation(
        "POST", "/infill", "Fill in text between two texts, as in llama.cpp", "NativeReply",
        "InfillRequest", infill.FIELDS, streams=True,
    ),
    Operation(
        "POST", "/apply-template", "The prompt of a conversation, as in llama.cpp", "Prompt",
        "TemplateRequest", props.TEMPLATE,
    ),
    Operation("GET", "/slots", "State of the slots, as in llama.cpp", "Slots"),
    Operation(
        "POST", "/v1/responses", "Continue a conversation, as OpenAI's newer clients do", "Response",
        "ResponseRequest", responses.FIELDS, streams=True,
    ),
    Operation("GET", "/v1/responses/{id}", "A stored response", "Response"),
    Operation("DELETE", "/v1/responses/{id}", "Delete a stored response", "Deleted"),
    Operation(
        "POST", "/v1/messages", "Continue a conversation, as with Anthropic", "MessagesReply",
        "MessagesRequest", anthropic.FIELDS, streams=True, error="AnthropicError",
    ),
    Operation(
        "POST", "/v1/messages/count_tokens", "Count a conversation's tokens, as with Anthropic", "TokenCount",
        "CountRequest", anthropic.COUNT, error="AnthropicError",
    ),
    Operation(
        "POST", "/api/chat", "Continue a conversation, as in Ollama", "OllamaChatReply",
        "OllamaChatRequest", ollama.CHAT, streams=True, stream="application/x-ndjson", error="OllamaError",
    ),
    Operation(
        "POST", "/api/generate", "Continue a text, as in Ollama", "OllamaReply",
        "OllamaRequest", ollama.GENERATE, streams=True, stream="application/x-ndjson", error="OllamaError",
    ),
    Operation(
        "POST", "/api/embed", "Embeddings of texts, as in Ollama", "OllamaVectors",
        "OllamaEmbedRequest", ollama_embeddings.EMBED, error="OllamaError",
    ),
    Operation(
        "POST", "/api/embeddings", "Embedding of a text, as in older versions of Ollama", "OllamaVector",
        "OllamaEmbeddingsRequest", ollama_embeddings.EMBEDDINGS, error="OllamaError",
    ),
    Operation(
        "POST", "/api/pull", "Check for the served model, as in Ollama", "OllamaStatus",
        "OllamaPullRequest", ollama.PULL, streams=True, stream="application/x-ndjson", error="OllamaError",
    ),
    Operation("GET", "/api/tags", "The model, as in Ollama", "OllamaModels", error="OllamaError"),
    Operation("GET", "/api/ps", "The loaded model, as in Ollama", "OllamaModels", error="OllamaError"),
    Operation(
        "POST", "/api/show", "Details of the model, as in Ollama", "OllamaModel",
        "OllamaShowRequest", ollama.SHOW, error="OllamaError",
    ),
    Operation("GET", "/api/version", "The server's version, as in Ollama", "Version", error="OllamaError"),
    Operation("POST", "/tokenize", "The tokens of a text", "Tokens", "TokenizeRequest", tokens.TOKENIZE),
    Operation("POST", "/detokenize", "The text of tokens", "Content", "DetokenizeRequest", tokens.DETOKENIZE),
)  # fmt: skip


@cache
def document() -> Document:
    """Returns the document for ``/openapi.json``; callers must not change it."""
    bodies = {route.body: Shape(route.fields).schema() for route in OPERATIONS if route.fields is not None}
    paths: Document = {}
    for route in OPERATIONS:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Hotcold",
            "version": __version__,
            "description": "A server for one language model, with the APIs of OpenAI, Anthropic, Ollama "
            "and llama.cpp. Fields that are not listed are ignored; null means the same as "
            "no field.",
        },
        "paths": paths,
        "components": {
            "schemas": {**bodies, **REPLIES},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _operation(route: Operation) -> Document:
    content: Document = {}
    if route.reply:
        content["application/json"] = {"schema": ref(route.reply)}
    else:
        content["text/plain"] = {"schema": STRING}
    if route.streams:
        content[route.stream] = {"schema": STRING}
    error = {"application/json": {"schema": ref(route.error)}}
    description: Document = {
        "operationId": route.name,
        "summary": route.summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "4XX": {"description": "What is wrong with the request.", "content": error},
            "503": {"description": "The server is busy or not ready: see Retry-After.", "content": error},
        },
    }
    if route.public:
        description["security"] = []
        description["responses"]["503"]["content"] = {"application/json": {"schema": OBJECT}}
    if route.body:
        body = {"application/json": {"schema": ref(route.body)}}
        description["requestBody"] = {"required": True, "content": body}
    if names := re.findall(r"\{(\w+)\}", route.path):
        description["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": STRING} for name in names
        ]
    return description


def table(fields: Fields) -> str:
    """Returns the fields of a body as a Markdown table of names, values, defaults and notes. A line after the
    table lists the unsupported fields with the values that are accepted."""
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
        lines += ["", f"Refused, except for the values in brackets: {', '.join(refused)}."]
    return "\n".join(lines)


def _shown(field: Field) -> str:
    return "" if field.default is None else f"`{json.dumps(field.default)}`"


def _values(schema: Schema) -> str:
    """Returns the allowed values in a few words. Numbers and booleans may also be text; the page says so."""
    if "anyOf" in schema:
        kinds = [each for each in schema["anyOf"] if NUMBER not in each.get("pattern", "")]
        schema = {**schema, "anyOf": kinds} if len(kinds) > 1 else kinds[0]
    if "anyOf" in schema:
        texts = [_values(each) for each in schema["anyOf"]]
        if sum(each.startswith("list") for each in texts) > 1:
            texts = [each.partition(",")[0] for each in texts]
        return " or ".join(dict.fromkeys(texts))
    if any(each is True for each in schema.get("enum", ())):
        return "true, false"
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    if "minimum" in schema:
        low, high = (_power(schema[bound]) for bound in ("minimum", "maximum"))
        return f"{low} to {high}" + (f", not {schema['not']['const']}" if "not" in schema else "")
    if schema.get("type") == "array":
        return f"list, up to {schema['maxItems']}" if "maxItems" in schema else "list"
    if "oneOf" in schema or schema.get("type") in ("object", ["object", "boolean"]):
        return "object"
    return {"string": "text"}[schema["type"]]


def _power(bound: float) -> str:
    """Returns a bound as text; large bounds are powers of two, or one less."""
    for number, less in ((bound, ""), (bound + 1, " - 1")):
        if (isinstance(number, int) and abs(number) > 1 << 19 and number & (number - 1) == 0) or number == -(
            1 << 63
        ):
            return f"{'-' if number < 0 else ''}2^{abs(int(number)).bit_length() - 1}{less}"
    return f"{bound:g}"
