"""Serves a model over HTTP: a web page, and the APIs of OpenAI, Anthropic, Ollama and llama.cpp. It prints
its address, such as http://127.0.0.1:8080. The page is at this address; OpenAI clients need /v1 after it,
other clients do not. /openapi.json lists the routes. SIGTERM and Ctrl-C let running requests finish; a second
signal ends the server at once. Exit codes: 0 stopped; 2 a mistake, such as a port in use or a model that
cannot be loaded; 70 the engine process died."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from hotcold.commands import options
from hotcold.formats.gguf import open_gguf
from hotcold.hub.names import is_hub_name, parse
from hotcold.runtime.opening import file_of
from hotcold.runtime.options import complete

if TYPE_CHECKING:
    from hotcold.server.run import Listening
    from hotcold.server.settings import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on; 0.0.0.0 for all of IPv4, :: for all of IPv6 and IPv4 (default: "
        "127.0.0.1, for this machine only)",
    )
    add(
        "--port",
        type=options.whole_number(0, 65535),
        default=8080,
        metavar="N",
        help="port to listen on; 0: a free one (default: 8080)",
    )
    add(
        "--api-key-file",
        type=options.file_path,
        metavar="FILE",
        help="file with the keys that clients may send, one per line (default: the key in $HOTCOLD_API_KEY)",
    )
    add(
        "--public-without-key",
        action="store_true",
        help="allow an address that other machines can reach, without a key",
    )
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name that requests may use; may be repeated (localhost, this machine's name and "
        "addresses are always allowed)",
    )
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin of web pages that may use the server, such as https://chat.example.org; may be repeated "
        "(pages of this machine always may)",
    )
    add("-a", "--alias", metavar="NAME", help="the model's name for clients (default: that of its file)")
    options.add_pooling_option(add)
    add(
        "--json-schema-open",
        action="store_true",
        help="allow properties that a JSON schema does not list, unless it forbids them (as in the standard)",
    )
    add("--log-disable", action="store_true", help="do not log requests to stderr")
    _add_request_options(parser)
    options.add_template_options(parser)
    options.add_model_options(parser)
    options.add_draft_options(parser)
    options.add_sampling_options(parser)


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add(
        "-np",
        "--parallel",
        type=options.whole_number(1, 256),
        default=4,
        metavar="N",
        help="how many requests run at the same time, each with a context of -c (default: 4)",
    )
    add(
        "-n",
        "--n-predict",
        "--predict",
        type=options.token_count,
        metavar="N",
        help="at most N tokens per answer, if the request sets no limit; -1: until the context is full "
        "(default: 2048; 16 for /v1/completions)",
    )
    add(
        "--reasoning-budget",
        type=options.whole_number(-1),
        default=-1,
        metavar="N",
        help="at most N tokens of thinking per answer, if the request sets no limit; 0: none, -1: no limit "
        "(default: -1)",
    )
    add(
        "--max-waiting",
        type=options.whole_number(0, 100_000),
        default=64,
        metavar="N",
        help="how many more requests may wait; others are refused with status 429 (default: 64)",
    )
    add(
        "--cache-positions",
        type=options.whole_number(1),
        metavar="N",
        help="size in tokens of the KV cache that requests share (default: -np times -c, or fewer if "
        "memory is short)",
    )
    add(
        "--state-copies",
        type=options.whole_number(0, 100_000),
        metavar="N",
        help="for models with recurrent layers: number of states kept for prompts with a common prefix "
        "(default: as many as fit in 1/8 of free memory)",
    )
    _add_limit_options(add)


def _add_limit_options(add: Callable[..., object]) -> None:
    add(
        "-to",
        "--timeout",
        type=options.whole_number(1, 86_400),
        default=600,
        metavar="S",
        help="seconds that a request may wait in the queue, and then without a new token (default: 600)",
    )
    add(
        "--deadline",
        type=options.whole_number(1, 86_400 * 7),
        metavar="S",
        help="seconds that a whole answer may take, waiting included (default: no limit)",
    )
    add(
        "--drain",
        type=options.whole_number(0, 86_400),
        default=30,
        metavar="S",
        help="seconds that running requests may continue after SIGTERM (default: 30)",
    )
    add(
        "--max-connections",
        type=options.whole_number(1, 100_000),
        default=512,
        metavar="N",
        help="how many connections may be open at the same time (default: 512)",
    )
    add(
        "--max-body",
        type=_body_size,
        default=4 << 20,
        metavar="SIZE",
        help="limit of a request's body, such as 512KiB (default: 4MiB)",
    )


def _body_size(text: str) -> int:
    """Parses a size from 1KiB to 1GiB."""
    nbytes = options.byte_size(text)
    if not 1 << 10 <= nbytes <= 1 << 30:
        needed = "a size from 1KiB to 1GiB, such as 512KiB (a bare number is GiB)"
        raise argparse.ArgumentTypeError(f"{text!r} is not {needed}")
    return nbytes


def run(args: argparse.Namespace) -> int:
    llm_options: Any = {
        **options.model_options(args),
        **options.draft_options(args),
        "sequences": args.parallel,
        "cache_positions": args.cache_positions,
        "state_copies": args.state_copies,
    }
    complete(llm_options)  # raises UserError before anything is opened
    settings = _settings(args)
    model = options.local_model(args.model)
    with open_gguf(file_of(model)):  # refuses a file that is not a model before anything starts
        pass

    from hotcold.api.async_llm import AsyncLLM
    from hotcold.server.run import serve

    llm = AsyncLLM(model, max_waiting=args.max_waiting, **llm_options)
    return serve(llm, settings, args.alias, partial(_say_ready, verbose=args.verbose))


def _settings(args: argparse.Namespace) -> "Settings":
    from hotcold.server import origins, settings

    return settings.Settings(
        host=args.host,
        port=args.port,
        keys=settings.api_keys(args.api_key_file),
        public_without_key=args.public_without_key,
        allow_hosts=tuple(map(settings.check_host, args.allow_host)),
        cors_origins=tuple(map(origins.check_origin, args.cors_origin)),
        open_schemas=args.json_schema_open,
        hub_name=str(parse(args.model)) if is_hub_name(args.model) else "",
        log=not args.log_disable,
        timeout_s=args.timeout,
        deadline_s=args.deadline,
        drain_s=args.drain,
        connections=args.max_connections,
        body_bytes=args.max_body,
        sampling=options.sampling_given(args),
        max_tokens=args.n_predict,
        thinking_budget=None if args.reasoning_budget < 0 else args.reasoning_budget,
    )


def _say_ready(listening: "Listening", *, verbose: bool) -> None:
    options.print_notes_of(listening.service.llm.info, verbose=verbose)
    facts = listening.service.facts
    print(
        f"{facts.name} at {listening.url} ({facts.slots} requests at a time, {facts.context} tokens each)",
        flush=True,
    )
    sys.stdout.flush()
