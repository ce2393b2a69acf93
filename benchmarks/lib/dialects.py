"""The dialects of conversations: what each asks, and what its replies and events add to an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
RESPONSES, MESSAGES, OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"
#: Routes that continue a conversation.
CONVERSATIONS = (CHAT, RESPONSES, MESSAGES, OLLAMA)


@dataclass
class Answer:
    """An answer as it arrived."""

    status: int = 0
    texts: dict[int, str] = field(default_factory=dict)  #: by choice
    reasons: dict[int, str] = field(default_factory=dict)  #: why each ended
    tokens: int = 0  #: as the server says, or how many pieces came
    moments: dict[int, list[float]] = field(default_factory=dict)  #: seconds from the request to each piece
    seconds: float = 0.0
    whole: bool = False
    error: str = ""
    retry_after_s: float | None = None


def conversation(route: str, text: str, length: int, sampling: dict[str, Any]) -> dict[str, Any]:
    """The body that asks for an answer of ``length`` tokens at most to what a user says."""
    messages = [{"role": "user", "content": text}]
    if route == RESPONSES:
        return {"input": text, "max_output_tokens": length, **sampling}
    if route == OLLAMA:
        return {"messages": messages, "options": {"num_predict": length, **sampling}}
    return {"messages": messages, "max_tokens": length, **sampling}


def with_stops(route: str, body: dict[str, Any], stops: list[str]) -> dict[str, Any]:
    """The body with texts that end the answer, where the dialect has them."""
    if route == RESPONSES:
        return body
    if route == OLLAMA:
        return {**body, "options": {**body["options"], "stop": stops}}
    return {**body, "stop_sequences" if route == MESSAGES else "stop": stops}


def take(route: str, data: Any, answer: Answer, moment: float | None) -> None:
    """Adds a reply, or, with the moment it came at, an event."""
    kinds = {NATIVE: _native, RESPONSES: _response, MESSAGES: _message, OLLAMA: _ollama}
    kinds.get(route, _openai)(data, answer, moment)


def error_of(data: Any) -> str:
    """The error that an event tells of; empty where it does not."""
    if data.get("type") == "error":
        return str(data.get("error") or data.get("message"))[:200]
    return str(data["error"])[:200] if data.get("error") else ""


def _native(data: Any, answer: Answer, moment: float | None) -> None:
    add(answer, 0, data["content"], moment)
    if data.get("stop"):
        answer.reasons[0] = data.get("stop_type", "stop")
        answer.tokens = data.get("timings", {}).get("predicted_n") or data.get("tokens_predicted", 0)
        answer.whole = moment is not None and not answer.error


def _openai(data: Any, answer: Answer, moment: float | None) -> None:
    """Both of OpenAI's older routes; a stream is whole once [DONE] has come."""
    for choice in data["choices"]:
        index = choice["index"]
        if "text" in choice:
            text = choice["text"]
        else:
            message = choice["message"] if moment is None else choice["delta"]
            text = (message.get("reasoning_content") or "") + (message.get("content") or "")
        add(answer, index, text, moment)
        if choice.get("finish_reason"):
            answer.reasons[index] = choice["finish_reason"]
    if data.get("usage"):
        answer.tokens = data["usage"]["completion_tokens"]


def _response(data: Any, answer: Answer, moment: float | None) -> None:
    if moment is None:
        parts = [part for item in data["output"] for part in item.get("content", ())]
        add(answer, 0, "".join(part["text"] for part in parts), None)
    elif data["type"] in ("response.output_text.delta", "response.reasoning_text.delta"):
        add(answer, 0, data["delta"], moment)
    whole = data if moment is None else data.get("response", {})
    if whole.get("status") in ("completed", "incomplete"):
        add(answer, 0, "", None)
        answer.reasons[0] = whole["status"]
        answer.tokens = whole["usage"]["output_tokens"]
        answer.whole = not answer.error


def _message(data: Any, answer: Answer, moment: float | None) -> None:
    if moment is None:
        blocks = data["content"]
        add(answer, 0, "".join(each.get("thinking") or each.get("text") or "" for each in blocks), None)
    elif data["type"] == "content_block_delta":
        add(answer, 0, data["delta"].get("thinking") or data["delta"].get("text") or "", moment)
    changes = data if moment is None else data.get("delta", {})
    if changes.get("stop_reason"):
        add(answer, 0, "", None)
        answer.reasons[0] = changes["stop_reason"]
        answer.tokens = data["usage"]["output_tokens"]
    if data["type"] == "message_stop":
        answer.whole = bool(answer.reasons) and not answer.error


def _ollama(data: Any, answer: Answer, moment: float | None) -> None:
    message = data["message"]
    add(answer, 0, (message.get("thinking") or "") + message["content"], moment)
    if data["done"]:
        answer.reasons[0] = data["done_reason"]
        answer.tokens = data["eval_count"]
        answer.whole = not answer.error


def add(answer: Answer, index: int, text: str, moment: float | None) -> None:
    answer.texts[index] = answer.texts.get(index, "") + text
    if moment is not None and text:
        answer.moments.setdefault(index, []).append(moment)
