"""`accel store`: what is kept of compiled graphs, looked at and carried about by a person at this machine."""

from __future__ import annotations

import argparse
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from . import store_bundle, store_location, store_prune
from .store_bundle import Outcome
from .store_entry import MANIFEST, BadEntry, Manifest, read_manifest
from .store_folder import Folder
from .store_trust import NoSecret, seals

NO_TRUST = """\
Not imported. A bundle is code: its graphs run in your ComfyUI with all that it may do, and whoever made the bundle
can have put anything into it. If you made it, or trust who did, import it with --trust."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, or 1 with a sentence on stderr."""
    options = _parser().parse_args(arguments)
    home = options.home or _comfyui_home()
    try:
        folder = store_location.folder(home)
        if folder is None:
            return _fail("Which store? Name its folder with --home or ACCEL_STORE; GET /accel/state shows it.")
        return options.run(options, folder, store_location.secret(home))
    except NoSecret as error:
        return _fail(f"{error}.")
    except zipfile.BadZipFile:
        return _fail(f"{options.file} is not a bundle.")
    except OSError as error:
        return _fail(f"{error}.")


def _list(options: argparse.Namespace, folder: Folder, secret: Path) -> int:
    total = count = 0
    for file in sorted(folder.files()):
        total += file.size
        if file.name.endswith(MANIFEST):
            count += 1
            try:
                manifest, _ = read_manifest(folder.read(file.name))
                print(_line(manifest))
            except (BadEntry, FileNotFoundError) as bad:
                print(f"{file.name}: {bad}")
    print(f"{count} graphs, {total / 2**20:.1f} MB in {folder}")
    return 0


def _verify(options: argparse.Namespace, folder: Folder, secret: Path) -> int:
    return _tell(list(store_bundle.verify(folder, seals(secret))), "sound")


def _export(options: argparse.Namespace, folder: Folder, secret: Path) -> int:
    kinds = frozenset(options.kind) if options.kind else None
    return _tell(store_bundle.export(folder, seals(secret), options.file, kinds), f"exported to {options.file}")


def _import(options: argparse.Namespace, folder: Folder, secret: Path) -> int:
    if not options.trust:
        for item in store_bundle.read(options.file):
            print(f"{item.entry}: {item.reason}" if isinstance(item, Outcome) else _line(item[0]))
        return _fail(NO_TRUST)
    return _tell(store_bundle.import_trusted(options.file, folder, seals(secret)), f"imported to {folder}")


def _prune(options: argparse.Namespace, folder: Folder, secret: Path) -> int:
    limit = store_location.max_bytes() if options.max_mb is None else options.max_mb << 20
    print(f"{store_prune.prune(folder, limit)} graphs deleted.")
    return 0


def _tell(outcomes: list[Outcome], done: str) -> int:
    bad = [outcome for outcome in outcomes if outcome.reason is not None]
    for entry, reason in bad:
        print(f"{entry if isinstance(entry, str) else _line(entry)}: {reason}", file=sys.stderr)
    print(f"{len(outcomes) - len(bad)} graphs {done}, {len(bad)} not.")
    return 1 if bad else 0


def _line(manifest: Manifest) -> str:
    environment = manifest.environment
    where = f"torch {environment.get('torch', '?').split()[0]}, {environment.get('device', '?')}"
    # A bundle may be anybody's: what it says must not steer the terminal.
    text = f"{manifest.name}  {manifest.stem}  {manifest.size / 1024:.0f} KB  {where}"
    return "".join(character if character.isprintable() else "?" for character in text)


def _fail(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 1


def _comfyui_home() -> Path | None:
    """The folder that ComfyUI gives the store, where this pack lies in a ComfyUI's custom_nodes."""
    pack = Path(__file__).resolve().parent.parent
    user = pack.parent.parent / "user"
    return user / "__accel" if pack.parent.name == "custom_nodes" and user.is_dir() else None


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="accel store", description=__doc__)
    parser.add_argument("--home", type=Path, metavar="DIR", help="the folder with `secret` and `graphs`")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name, run, summary):
        added = commands.add_parser(name, help=summary, description=summary)
        added.set_defaults(run=run, file=None)
        return added

    command("list", _list, "Show what is saved.")
    command("verify", _verify, "Check all that is saved against its checksums and seals.")
    export = command("export", _export, "Write what is saved to one file.")
    export.add_argument("file", type=Path)
    export.add_argument("--kind", action="append", metavar="NAME", help="this kind of block alone; may be repeated")
    bring = command("import", _import, "Take the graphs of a bundle over; without --trust only show them.")
    bring.add_argument("file", type=Path)
    bring.add_argument("--trust", action="store_true", help="the bundle's code may run here")
    prune = command("prune", _prune, "Delete what was used longest ago.")
    prune.add_argument("--max-mb", type=_whole, metavar="N", help="what may stay, in MB (default: the store's own)")
    return parser
