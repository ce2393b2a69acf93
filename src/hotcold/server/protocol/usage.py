"""Counts of tokens and times of a request."""

from collections.abc import Sequence
from typing import Any

from hotcold.server.protocol.answers import Answer


def usage(answers: Sequence[Answer], n: int = 1) -> dict[str, Any]:
    """Returns OpenAI's ``usage``. ``n`` texts continue the same prompt, which counts once."""
    firsts = [each.last for each in answers[::n] if each.last is not None]
    prompt = sum(each.prompt_tokens for each in firsts)
    completion = sum(each.tokens for each in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.reused for each in firsts)},
        "completion_tokens_details": {"reasoning_tokens": sum(each.reasoning_tokens for each in answers)},
    }


def timings(answers: Sequence[Answer], n: int = 1, sparsity: str = "") -> dict[str, Any]:
    """Returns llama.cpp's ``timings``, in milliseconds, of texts that ran at the same time.

    ``prompt_ms`` is the time to the first token, queue included. Rates of answers exclude the first token,
    which comes with the prompt. ``draft_n`` is present only with draft tokens. ``sparsity``, the mode, is
    Hotcold's own field."""
    pieces = [each.last for each in answers if each.last is not None]
    firsts = [each.last for each in answers[::n] if each.last is not None]
    reused = sum(each.reused for each in firsts)
    prompt_n = sum(each.prompt_tokens for each in firsts) - reused
    predicted_n = sum(each.tokens for each in answers)
    arrivals = [t for each in pieces if (t := each.timings.added) is not None]
    first_tokens = [t for each in pieces if (t := each.timings.first_token) is not None]
    ends = [t for each in pieces if (t := each.timings.finished) is not None]
    prompt_s = max(0.0, min(first_tokens) - min(arrivals)) if first_tokens and arrivals else 0.0
    predicted_s = max(0.0, max(ends) - min(first_tokens)) if first_tokens and ends else 0.0
    after = max(0, predicted_n - len(first_tokens))
    fields: dict[str, Any] = {
        "cache_n": reused,
        "prompt_n": prompt_n,
        "prompt_ms": 1e3 * prompt_s,
        "prompt_per_token_ms": 1e3 * prompt_s / max(prompt_n, 1),
        "prompt_per_second": prompt_n / prompt_s if prompt_s else 0.0,
        "predicted_n": predicted_n,
        "predicted_ms": 1e3 * predicted_s,
        "predicted_per_token_ms": 1e3 * predicted_s / max(after, 1),
        "predicted_per_second": after / predicted_s if predicted_s else 0.0,
    }
    if guessed := sum(each.guessed for each in pieces):
        fields |= {"draft_n": guessed, "draft_n_accepted": sum(each.accepted for each in pieces)}
    return {**fields, "sparsity": sparsity} if sparsity else fields
