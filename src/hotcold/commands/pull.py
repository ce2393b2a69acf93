"""Downloads a model from the Hugging Face hub: all missing files of it, if it is split.

A download that was cut off continues. Files are checked against the hub's checksums. They go into the cache
of the Hugging Face tools (HF_HUB_CACHE, HF_HOME) or into HOTCOLD_CACHE. HF_TOKEN is the token for the hub."""

import argparse

from hotcold.commands import options
from hotcold.commands.progress import DOWNLOADING, progress
from hotcold.hub import download as hub


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "OWNER/NAME, OWNER/NAME:Q4_K_M, OWNER/NAME:FILE.gguf; @REVISION after it for other than main"
    parser.add_argument("name", type=options.hub_name, metavar="REPO[:FILE]", help=about)
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    with progress(DOWNLOADING, in_bytes=True) as advance:
        pulled = hub.pull(args.name, advance, lambda line: options.print_notes([line]))
    first = f"hf:{pulled.name.repo}/{pulled.files[0]}"
    if not args.json:
        files = f"{len(pulled.files)} files, " if len(pulled.files) > 1 else ""
        print(f"{first} at {pulled.commit[:12]}: {files}{options.size(pulled.nbytes)}")
        print(pulled.path)
    report = {
        "model": first,
        "path": str(pulled.path),
        "commit": pulled.commit,
        "files": list(pulled.files),
        "bytes": pulled.nbytes,
        "downloaded_bytes": pulled.downloaded,
    }
    return options.end(args, report)
