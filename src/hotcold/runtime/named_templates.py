"""Named chat templates, which users may give instead of Jinja."""

from collections.abc import Mapping
from typing import Any

from hotcold.errors import UserError
from hotcold.values import shown

_KEY = "tokenizer.chat_template"

_CHATML = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_GEMMA = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}\
{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}\
{% for message in messages %}<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{{ first if loop.first else '' }}{{ message.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
_LLAMA2 = """\
{% if messages[0].role == 'system' %}{% set first = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}\
{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}\
{% for message in messages %}{% if message.role == 'assistant' %} {{ message.content }} {{ eos_token }}\
{% else %}{{ bos_token }}[INST] {{ first if loop.first else '' }}{{ message.content }} [/INST]{% endif %}\
{% endfor %}"""
_LLAMA3 = """\
{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>{% endfor %}\
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
_MISTRAL = """\
{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}\
{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}\
{% for message in messages %}{% if message.role == 'assistant' %} {{ message.content }}{{ eos_token }}\
{% else %}[INST] {{ first if loop.first else '' }}{{ message.content }} [/INST]{% endif %}{% endfor %}"""
_PHI3 = """\
{% for message in messages %}<|{{ message.role }}|>
{{ message.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
_VICUNA = """\
{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}

{% elif message.role == 'assistant' %}ASSISTANT: {{ message.content }}{{ eos_token }}
{% else %}USER: {{ message.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"""
_ZEPHYR = """\
{% for message in messages %}<|{{ message.role }}|>
{{ message.content }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

#: The names are llama.cpp's.
TEMPLATES: Mapping[str, str] = {
    "chatml": _CHATML,
    "gemma": _GEMMA,
    "llama2": _LLAMA2,
    "llama3": _LLAMA3,
    "mistral-v1": _MISTRAL,
    "phi3": _PHI3,
    "vicuna": _VICUNA,
    "zephyr": _ZEPHYR,
}


def template_text(template: str) -> str:
    """Returns a template's text, for a name or for Jinja. UserError: neither."""
    if not isinstance(template, str):
        kind = type(template).__name__
        raise UserError(f"chat template of type {kind}: Jinja as text, or a name, is needed")
    if "{{" in template or "{%" in template:
        return template
    if template in TEMPLATES:
        return TEMPLATES[template]
    allowed = f"Jinja, or one of {', '.join(TEMPLATES)}"
    raise UserError(f"chat template {shown(template, 60)} is not a template: {allowed}")


def with_template(metadata: Mapping[str, Any], template: str | None) -> Mapping[str, Any]:
    """Replaces all templates in a file's metadata by one; None changes nothing."""
    if template is None:
        return metadata
    others = {key: value for key, value in metadata.items() if not key.startswith(f"{_KEY}.")}
    return {**others, _KEY: template}
