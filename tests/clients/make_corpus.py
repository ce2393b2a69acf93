"""Makes the seeds of tests/corpus/client_requests, and headers.json, of what clients sent.

    HOTCOLD_RECORD_CLIENTS=FOLDER pytest tests/clients
    python tests/clients/make_corpus.py FOLDER

A seed is the body of a request, a field a line. It is named after its client and says what it is."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORPUS = HERE.parent / "corpus" / "client_requests"
#: The seed, the test that recorded it, and which of its requests it is.
SEEDS = {
    "openai_parse": ("openai-a_parsed_answer", 0),
    "openai_parse_stream": ("openai-a_parsed_stream", 0),
    "openai_tools": ("openai-tools_in_two_requests", 0),
    "openai_result": ("openai-tools_in_two_requests", 1),
    "openai_tools_stream": ("openai-streamed_calls", 0),
    "openai_chosen_tool": ("openai-a_chosen_tool", 0),
    "langchain_schema": ("langchain-structured_output_by_default", 0),
    "langchain_open_schema": ("langchain-structured_output_without_a_class", 1),
    "langchain_function": ("langchain-structured_output_function_calling_", 0),
    "langchain_tools": ("langchain-bound_tools", 0),
    "langchain_result": ("langchain-bound_tools_in_two_requests_any_", 1),
    "langchain_strict": ("langchain-tools_that_are_classes", 0),
    "pydantic-ai_output": ("pydantic_ai-an_output_of_a_class", 0),
    "pydantic-ai_native": ("pydantic_ai-an_output_by_response_format", 0),
    "pydantic-ai_tools": ("pydantic_ai-tools", 0),
    "pydantic-ai_result": ("pydantic_ai-a_tool_and_then_the_output_Person-then1_", 1),
    "pydantic-ai_retry": ("pydantic_ai-another_try", 1),
    "pydantic-ai_stream": ("pydantic_ai-a_streamed_output", 0),
    "instructor_tools": ("instructor-a_model", 0),
    "instructor_schema": ("instructor-modes_JSON_SCHEMA_", 0),
    "instructor_list": ("instructor-a_list", 0),
    "instructor_partial": ("instructor-a_partial_model", 0),
    "instructor_retry": ("instructor-another_try", 1),
}


def main(folder: Path) -> None:
    headers: dict[str, dict[str, str]] = {}
    for seed, (name, number) in SEEDS.items():
        lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        request = json.loads(lines[number])
        headers.setdefault(seed.partition("_")[0], request["headers"])
        fields = [json.dumps({field: value}) for field, value in request["body"].items()]
        text = re.sub(r"(call_)[0-9A-Za-z]+", r"\g<1>0", "\n".join(fields) + "\n")
        (CORPUS / f"{seed}.jsonl").write_text(text, encoding="utf-8")
    (HERE / "headers.json").write_text(json.dumps(headers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
