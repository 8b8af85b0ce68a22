"""The command `store`: shows, exports and imports saved graphs, for a person at this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ...core.sentences import counted
from ...store import bundle, location, manifest
from ...store.bundle import BadBundle, Outcome
from ...store.folder import Folder
from ...store.manifest import GRAPH, BadEntry, Manifest, printable
from .home import find

NO_TRUST = """\
Not imported. A bundle is code: its graphs run in your ComfyUI with all that it may do, and whoever made the bundle
can have put anything into it. If you made it, or trust who did, import it with --trust."""

NO_HOME = "Whose store? Name ComfyUI's user folder with --user-directory, or the store's own with --home."


class Refused(Exception):
    """The command was not run; the message is a whole sentence that says why."""


def main(arguments: Sequence[str], command: str = "comfy-accel store") -> int:
    """Run the command and return its exit code: 0, or 1 with a sentence on stderr."""
    options = _parser(command).parse_args(arguments)
    home = find(options.home, options.user_directory, options.base_directory)
    try:
        folder = location.folder(home)
        if folder is None:
            raise Refused(f"{location.VARIABLE} turns the store off." if location.is_off() else NO_HOME)
        return options.run(options, folder, home)
    except Refused as refused:
        sentence = str(refused)
    except BadBundle as bad:
        sentence = f"{printable(str(options.file))}: {bad}."
    except OSError as error:
        sentence = f"{printable(str(error))}."
    print(sentence, file=sys.stderr)
    return 1


def _list(options: argparse.Namespace, folder: Folder, home: Path | None) -> int:
    total = count = 0
    for file in sorted(folder.files()):
        total += file.size
        if file.name.endswith(GRAPH):
            count += 1
            try:
                print(_line(manifest.read(folder, file.name.removesuffix(GRAPH))))
            except (BadEntry, OSError) as bad:
                print(printable(f"{file.name}: {bad}"))
    print(f"{counted(count, 'graph')}, {total / 2**20:.1f} MB in {folder}")
    return 0


def _export(options: argparse.Namespace, folder: Folder, home: Path | None) -> int:
    return _report(bundle.export(folder, options.file), f"exported to {options.file}")


def _import(options: argparse.Namespace, folder: Folder, home: Path | None) -> int:
    """home: None where only ACCEL_STORE says where the graphs are."""
    if not options.trust:
        for item in bundle.read(options.file):
            print(_outcome(item) if isinstance(item, Outcome) else _line(item[0]))
        raise Refused(NO_TRUST)
    limit = location.max_bytes(home) or None
    outcomes = bundle.take(bundle.read(options.file, limit), folder)
    if limit is not None:
        folder.prune(limit)
    return _report(outcomes, f"imported to {folder}")


def _report(outcomes: list[Outcome], done: str) -> int:
    bad = [outcome for outcome in outcomes if outcome.reason is not None]
    for outcome in bad:
        print(_outcome(outcome), file=sys.stderr)
    print(f"{counted(len(outcomes) - len(bad), 'graph')} {done}, {len(bad)} not.")
    return 1 if bad else 0


def _outcome(outcome: Outcome) -> str:
    entry = outcome.entry if isinstance(outcome.entry, str) else _line(outcome.entry)
    return f"{entry}: {outcome.reason}"


def _line(entry: Manifest) -> str:
    environment = entry.environment
    where = f"torch {environment.get('torch', '?').partition(' ')[0]}, {environment.get('device', '?')}"
    # Anybody may have made a bundle: its text must not control the terminal.
    return "  ".join(map(printable, (entry.name, entry.stem, f"{entry.size / 1024:.0f} KB", where)))


def _places(default: object) -> argparse.ArgumentParser:
    """The options that say whose store it is; they may come before the command or after it."""
    places = argparse.ArgumentParser(add_help=False, argument_default=default)
    places.add_argument("--user-directory", type=Path, metavar="DIR", help="what ComfyUI was started with by this name")
    places.add_argument("--base-directory", type=Path, metavar="DIR", help="the same, where that is all it was given")
    places.add_argument("--home", type=Path, metavar="DIR", help="the store's own folder, of any program")
    return places


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=command, description=__doc__, parents=[_places(None)])
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name, run, summary):
        added = commands.add_parser(name, help=summary, description=summary, parents=[_places(argparse.SUPPRESS)])
        added.set_defaults(run=run, file=None)
        return added

    add("list", _list, "Show what is saved.")
    export = add("export", _export, "Write what is saved to one file.")
    export.add_argument("file", type=Path)
    bring = add("import", _import, "Take the graphs of a bundle over; without --trust only show them.")
    bring.add_argument("file", type=Path)
    bring.add_argument("--trust", action="store_true", help="the bundle's code may run here")
    return parser
