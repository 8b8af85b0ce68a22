"""File systems that tests have no disk of."""

import errno
import os
import sys
from types import SimpleNamespace


def without_links(monkeypatch):
    """As on FAT: a file has one name."""

    def link(*paths):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)


def as_on_windows(monkeypatch, module):
    """This module alone believes that it runs on Windows."""
    monkeypatch.setattr(module, "sys", SimpleNamespace(**{**vars(sys), "platform": "win32"}))


def held_open():
    """What Windows answers to whoever replaces or deletes a file that somebody has open."""
    return PermissionError(errno.EACCES, "The process cannot access the file because it is being used by another one")
