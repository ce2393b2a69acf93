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
    nbytes = sum(each.nbytes for each in gone)
    if not args.json:
        for each in gone:
            what = (
                f"hf:{each.repo}/{each.file} at {each.commit[:12]}" if each.file else "an unfinished download"
            )
            print(f"removed {printable(what, 2000)}, {options.size(each.nbytes)}")
    report = {"removed": [each.file for each in gone], "bytes": nbytes}
    return options.end(args, report)
