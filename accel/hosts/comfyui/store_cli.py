"""The command `store`: shows, checks, exchanges, publishes and deletes saved graphs, for a person at this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ...core.sentences import counted
from ...store import bundle, location, manifest, publishing
from ...store.bundle import BadBundle, Outcome
from ...store.folder import Folder
from ...store.manifest import MANIFEST, BadEntry, Manifest, printable
from ...store.prune import prune
from ...store.publishing import CannotPublish
from ...store.signing import NoSecret, Seals, seals
from .home import Home, find

NO_TRUST = """\
Not imported. A bundle is code: its graphs run in your ComfyUI with all that it may do, and whoever made the bundle
can have put anything into it. If you made it, or trust who did, import it with --trust."""

NO_HOME = "Whose store? Name ComfyUI's user folder with --user-directory, or the store's own with --home."


class Refused(Exception):
    """The command was not run; the message is a whole sentence that says why."""


class Store(NamedTuple):
    """The store that a command works on. home: None where only ACCEL_STORE says where the graphs are."""

    home: Home | None
    folder: Folder

    @property
    def path(self) -> Path | None:
        return None if self.home is None else self.home.path

    @property
    def publishers(self) -> Path:
        """The file with those who are trusted. Raises Refused: no installation is known."""
        if self.path is None:
            raise Refused(NO_HOME)
        return self.path / "publishers.json"

    @property
    def serials(self) -> Path:
        """The file with the number of the latest label that was seen of each."""
        return self.publishers.with_name("pulled.json")

    def seals(self, make: bool = False) -> Seals:
        """Seals with the secret that ComfyUI checks with. make: a new secret where there is none."""
        try:
            return seals(location.secret(self.path), make)
        except NoSecret as error:
            if self.home is None or self.home.given:
                raise
            # With a secret made in the wrong place, graphs would be sealed that ComfyUI then refuses.
            raise Refused(f"{error}. Name the user folder that ComfyUI uses with --user-directory.") from error


def main(arguments: Sequence[str], command: str = "comfy-accel store") -> int:
    """Run the command and return its exit code: 0, or 1 with a sentence on stderr."""
    options = _parser(command).parse_args(arguments)
    home = find(options.home, options.user_directory, options.base_directory)
    try:
        folder = location.folder(None if home is None else home.path)
        if folder is None:
            if location.is_off():
                raise Refused(f"{location.VARIABLE} turns the store off.")
            raise Refused(NO_HOME)
        return options.run(options, Store(home, folder))
    except Refused as refused:
        sentence = str(refused)
    except BadBundle as bad:
        sentence = f"{printable(str(options.file))}: {bad}."
    except (NoSecret, BadEntry, CannotPublish, OSError) as error:
        sentence = f"{printable(str(error))}."
    print(sentence, file=sys.stderr)
    return 1


def _list(options: argparse.Namespace, store: Store) -> int:
    total = count = 0
    for file in sorted(store.folder.files()):
        total += file.size
        if file.name.endswith(MANIFEST):
            count += 1
            try:
                print(_line(manifest.read(store.folder, file.name.removesuffix(MANIFEST))[0]))
            except (BadEntry, OSError) as bad:
                print(printable(f"{file.name}: {bad}"))
    print(f"{counted(count, 'graph')}, {total / 2**20:.1f} MB in {store.folder}")
    return 0


def _verify(options: argparse.Namespace, store: Store) -> int:
    seals = store.seals()
    print(f"The seals are checked with {seals.source}.")
    return _report(list(bundle.verify(store.folder, seals)), "sound")


def _export(options: argparse.Namespace, store: Store) -> int:
    return _report(bundle.export(store.folder, store.seals(), options.file), f"exported to {options.file}")


def _import(options: argparse.Namespace, store: Store) -> int:
    if not options.trust:
        for item in bundle.read(options.file):
            print(_outcome(item) if isinstance(item, Outcome) else _line(item[0]))
        raise Refused(NO_TRUST)
    limit = location.max_bytes(store.path) or None
    seals = store.seals(make=store.home is not None and store.home.given)
    print(f"Sealed with {seals.source}.")
    outcomes = bundle.take(bundle.read(options.file, limit), store.folder, seals)
    if limit is not None:
        prune(store.folder, limit)
    return _report(outcomes, f"imported to {store.folder}")


def _key(options: argparse.Namespace, store: Store) -> int:
    print(f"The private key is in {options.file}: keep it to yourself. The public one, to be trusted by others:")
    print(publishing.new_key(options.file))
    return 0


def _trust(options: argparse.Namespace, store: Store) -> int:
    if options.name is not None:
        publishing.trust(store.publishers, options.name, options.key or "")
    trusted = publishing.read_trusted(store.publishers)
    for name, key in sorted(trusted.items()):
        print(f"{key}  {printable(name)}")
    print(f"{counted(len(trusted), 'publisher')} trusted in {store.publishers}: their graphs may run here.")
    return 0


def _push(options: argparse.Namespace, store: Store) -> int:
    target = location.at(options.url)
    return _report(publishing.push(store.folder, store.seals(), target, options.key), f"pushed to {target}")


def _pull(options: argparse.Namespace, store: Store) -> int:
    try:
        from ...store.key import NotPortable, misfit
    except ImportError as error:
        raise Refused(f"What fits this machine is not known without torch: {error}.") from None
    trusted = publishing.read_trusted(store.publishers)
    limit = location.max_bytes(store.path) or None
    seals = store.seals(make=store.home is not None and store.home.given)
    count = refused = 0
    try:
        for pulled in publishing.pull(
            location.at(options.url), trusted, store.serials, misfit, store.folder, seals, limit
        ):
            count += pulled.graphs
            refused += pulled.reason is not None
            made = pulled.label.environment if pulled.label else {}
            where = "  ".join(printable(made.get(name, "?")) for name in ("torch", "system", "device"))
            if pulled.reason is not None:
                print(f"{printable(pulled.file)}: {printable(pulled.reason)}.", file=sys.stderr)
            else:
                print(f"{counted(pulled.graphs, 'graph')} by {printable(pulled.publisher)}: {where}")
    except NotPortable as error:
        raise Refused(f"{error}.") from None
    if limit is not None:
        prune(store.folder, limit)
    told = f"{counted(count, 'graph')} pulled to {store.folder}, sealed with {seals.source}"
    print(f"{told}; {counted(refused, 'bundle')} refused.")
    return 1 if refused and not count else 0


def _prune(options: argparse.Namespace, store: Store) -> int:
    limit = location.max_bytes(store.path) if options.max_mb is None else options.max_mb << 20
    if options.max_mb is None and not limit:
        raise Refused("The store's limit is 0, so nothing more is saved: say with --max-mb how much may stay.")
    print(f"{counted(prune(store.folder, limit), 'graph')} deleted.")
    return 0


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


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


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
    add("verify", _verify, "Check all that is saved against its checksums and seals.")
    export = add("export", _export, "Write what is saved to one file.")
    export.add_argument("file", type=Path)
    bring = add("import", _import, "Take the graphs of a bundle over; without --trust only show them.")
    bring.add_argument("file", type=Path)
    bring.add_argument("--trust", action="store_true", help="the bundle's code may run here")
    key = add("key", _key, "Make a key to sign graphs with; print its public half.")
    key.add_argument("file", type=Path, help="for the private half, which is new")
    trust = add("trust", _trust, "Show the publishers whose graphs may run here, or trust another.")
    trust.add_argument("name", nargs="?", help="what to call the publisher")
    trust.add_argument("key", nargs="?", help="the public key, as the publisher says it elsewhere than in the bundle")
    push = add("push", _push, "Publish what is saved, signed, in a folder or an object store.")
    push.add_argument("url", help="such as s3://bucket/graphs, or a folder")
    push.add_argument("--key", type=Path, required=True, metavar="FILE", help="made by the command key")
    pull = add("pull", _pull, "Take over what trusted publishers have signed and this machine can run.")
    pull.add_argument("url", help="where it was pushed to")
    pruning = add("prune", _prune, "Delete what was used longest ago.")
    pruning.add_argument("--max-mb", type=_whole, metavar="N", help="what may stay, in MB (default: the store's own)")
    return parser
