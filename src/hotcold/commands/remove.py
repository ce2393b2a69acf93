"""Deletes a downloaded model, or all models of a repository, from the cache of the Hugging Face tools. It
keeps other files there."""

import argparse

from hotcold.commands import options
from hotcold.hub import cache as hub_cache
from hotcold.values import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "name as hotcold list shows it, or OWNER/NAME for all files of a repository"
    parser.add_argument("name", type=options.hub_name, metavar="REPO[:FILE]", help=about)
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    gone = hub_cache.remove(args.name)
    nbytes = sum(model.nbytes for model in gone)
    if not args.json:
        for model in gone:
            label = (
                f"hf:{model.repo}/{model.file} at {model.commit[:12]}"
                if model.file
                else "an unfinished download"
            )
            print(f"removed {printable(label, 2000)}, {options.size(model.nbytes)}")
    report = {"removed": [model.file for model in gone], "bytes": nbytes}
    return options.end(args, report)
