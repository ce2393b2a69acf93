"""Lists the GGUF models in the cache of the Hugging Face tools: names for -m, sizes and revisions."""

import argparse

from hotcold.commands import options
from hotcold.hub.cache import Cached, cache_folder, cached
from hotcold.hub.names import HubName
from hotcold.values import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "list only the models of OWNER/NAME (default: all)"
    parser.add_argument("name", nargs="?", type=options.hub_name, metavar="REPO", help=about)
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    models = [model for model in cached() if args.name is None or model.repo == args.name.repo]
    if not args.json:
        lines = [_line(model) for model in models]
        print("\n".join(lines) if lines else _nothing(args.name))
    report = {
        "folder": str(cache_folder()),
        "models": [
            {
                "model": f"hf:{model.repo}/{model.file}" if model.file else None,
                "repo": model.repo,
                "files": model.files,
                "bytes": model.nbytes,
                "commit": model.commit or None,
                "refs": list(model.refs),
                "path": str(model.path),
            }
            for model in models
        ],
    }
    return options.end(args, report)


def _nothing(name: HubName | None) -> str:
    of = f" of {name.repo}" if name else ""
    return f"no models{of} in {printable(str(cache_folder()), 4096)}"


def _line(model: Cached) -> str:
    size = f"{options.size(model.nbytes):>11}"
    if not model.file:
        return (
            f"{size}  {'':<12}  {model.repo}: unfinished; hotcold pull continues, hotcold remove deletes it"
        )
    named = f" ({', '.join(model.refs)})" if model.refs else ""
    return f"{size}  {model.commit[:12]}  {printable(f'hf:{model.repo}/{model.file}{named}', 2000)}"
