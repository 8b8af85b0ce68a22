"""File systems that tests have no disk of."""

import errno
import os


def without_links(monkeypatch):
    """As on FAT: a file has one name."""

    def link(*paths):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
