"""The schemas of replies, for the server's OpenAPI description."""

from hotcold.server.protocol.fields import Schema
from hotcold.server.schema_kinds import (
    COUNT,
    MOMENT,
    NUMBER,
    OBJECT,
    STRING,
    TEXT_OR_NULL,
    list_of,
    object_of,
    or_null,
    ref,
)

_TOKEN = {"token": STRING, "logprob": NUMBER, "bytes": list_of(COUNT)}
_PIECE: Schema = {"anyOf": [STRING, list_of(COUNT)]}
_LOGPROBS = object_of(
    {
        "content": list_of(object_of({**_TOKEN, "top_logprobs": list_of(object_of(_TOKEN))})),
        "refusal": {"type": "null"},
    }
)
_CALL = object_of(
    {
        "id": STRING,
        "type": {"const": "function"},
        "function": object_of({"name": STRING, "arguments": STRING}),
    }
)
_MESSAGE = object_of(
    {
        "role": {"const": "assistant"},
        "content": TEXT_OR_NULL,
        "refusal": {"type": "null"},
        "reasoning_content": STRING,
        "tool_calls": list_of(_CALL),
    },
    optional=("reasoning_content", "tool_calls"),
)
_HEAD = {"id": STRING, "created": MOMENT, "model": STRING, "system_fingerprint": STRING}
_COLUMNS = object_of(
    {
        "tokens": list_of(STRING),
        "token_logprobs": list_of({"type": ["number", "null"]}),
        "top_logprobs": list_of(or_null({"type": "object", "additionalProperties": NUMBER})),
        "text_offset": list_of(COUNT),
    }
)
_BLOCKS = (
    object_of({"type": {"const": "text"}, "text": STRING}),
    object_of({"type": {"const": "thinking"}, "thinking": STRING, "signature": STRING}),
    object_of({"type": {"const": "tool_use"}, "id": STRING, "name": STRING, "input": OBJECT}),
)
_HEAD_OF_OLLAMA = {
    "model": STRING,
    "created_at": STRING,
    "done": {"const": True},
    "done_reason": {"enum": ["stop", "length", "load"]},
}
REPLIES: dict[str, Schema] = {
    "Error": object_of(
        {"error": object_of({"message": STRING, "type": STRING, "param": TEXT_OR_NULL, "code": TEXT_OR_NULL})}
    ),
    "Usage": object_of(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": object_of({"cached_tokens": COUNT}),
            "completion_tokens_details": object_of({"reasoning_tokens": COUNT}),
        }
    ),
    "ChatReply": object_of(
        {
            **_HEAD,
            "object": {"const": "chat.completion"},
            "choices": list_of(
                object_of(
                    {
                        "index": COUNT,
                        "message": _MESSAGE,
                        "logprobs": or_null(_LOGPROBS),
                        "finish_reason": {"enum": ["stop", "length", "tool_calls"]},
                    }
                )
            ),
            "usage": ref("Usage"),
            "timings": OBJECT,
        }
    ),
    "CompletionReply": object_of(
        {
            **_HEAD,
            "object": {"const": "text_completion"},
            "choices": list_of(
                object_of(
                    {
                        "index": COUNT,
                        "text": STRING,
                        "logprobs": or_null(_COLUMNS),
                        "finish_reason": {"enum": ["stop", "length"]},
                    }
                )
            ),
            "usage": ref("Usage"),
            "timings": OBJECT,
        }
    ),
    "EmbeddingsReply": object_of(
        {
            "object": {"const": "list"},
            "model": STRING,
            "data": list_of(
                object_of(
                    {
                        "object": {"const": "embedding"},
                        "index": COUNT,
                        "embedding": {"anyOf": [list_of(NUMBER), STRING]},
                    }
                )
            ),
            "usage": object_of({"prompt_tokens": COUNT, "total_tokens": COUNT}),
        }
    ),
    "NativeReply": {
        "type": "object",
        "description": "With response_fields only these.",
        "properties": {
            "content": STRING,
            "tokens": list_of(COUNT),
            "stop": {"const": True},
            "stop_type": {"enum": ["eos", "limit", "word"]},
            "stopping_word": STRING,
            "tokens_predicted": COUNT,
            "tokens_evaluated": COUNT,
            "generation_settings": OBJECT,
            "timings": OBJECT,
        },
    },
    "Prompt": object_of({"prompt": STRING}),
    "Slots": list_of(object_of({"id": COUNT, "n_ctx": COUNT, "is_processing": {"type": "boolean"}})),
    "Tokens": object_of({"tokens": list_of({"anyOf": [COUNT, object_of({"id": COUNT, "piece": _PIECE})]})}),
    "Content": object_of({"content": STRING}),
    "Model": object_of(
        {
            "id": STRING,
            "object": {"const": "model"},
            "created": MOMENT,
            "owned_by": STRING,
            "type": {"const": "model"},
            "display_name": STRING,
            "created_at": STRING,
            "max_input_tokens": COUNT,
            "max_tokens": COUNT,
            "max_model_len": COUNT,
            "context_length": COUNT,
            "aliases": list_of(STRING),
            "meta": OBJECT,
        }
    ),
    "Models": object_of(
        {
            "object": {"const": "list"},
            "data": list_of(ref("Model")),
            "models": list_of(object_of({"name": STRING, "model": STRING, "capabilities": list_of(STRING)})),
            "has_more": {"const": False},
            "first_id": STRING,
            "last_id": STRING,
        }
    ),
    "AnthropicError": object_of(
        {"type": {"const": "error"}, "error": object_of({"type": STRING, "message": STRING})}
    ),
    "MessagesReply": object_of(
        {
            "id": STRING,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": STRING,
            "content": list_of({"oneOf": [*_BLOCKS]}),
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            "stop_sequence": TEXT_OR_NULL,
            "usage": object_of(
                {
                    "input_tokens": COUNT,
                    "cache_creation_input_tokens": COUNT,
                    "cache_read_input_tokens": COUNT,
                    "output_tokens": COUNT,
                }
            ),
        }
    ),
    "OllamaError": object_of({"error": STRING}),
    "OllamaChatReply": object_of(
        {**_HEAD_OF_OLLAMA, "message": object_of({"role": {"const": "assistant"}, "content": STRING})}
    ),
    "OllamaReply": object_of({**_HEAD_OF_OLLAMA, "response": STRING}),
    "OllamaVectors": object_of(
        {"model": STRING, "embeddings": list_of(list_of(NUMBER)), "prompt_eval_count": COUNT}
    ),
    "OllamaVector": object_of({"embedding": list_of(NUMBER)}),
    "OllamaStatus": object_of({"status": STRING}),
    "OllamaModels": object_of(
        {"models": list_of(object_of({"name": STRING, "model": STRING, "size": COUNT, "digest": STRING}))}
    ),
    "OllamaModel": object_of(
        {"details": OBJECT, "model_info": OBJECT, "capabilities": list_of(STRING), "template": STRING}
    ),
    "Version": object_of({"version": STRING}),
    "Response": object_of(
        {
            "id": STRING,
            "object": {"const": "response"},
            "created_at": MOMENT,
            "status": {"enum": ["completed", "incomplete"]},
            "model": STRING,
            "output": list_of(object_of({"type": STRING, "id": STRING, "status": STRING})),
            "usage": object_of({"input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT}),
        }
    ),
    "Deleted": object_of({"id": STRING, "object": {"const": "response"}, "deleted": {"const": True}}),
    "TokenCount": object_of({"input_tokens": COUNT}),
    "Anything": OBJECT,
}
