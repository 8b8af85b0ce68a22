"""Compiled graphs on disk, which survive a restart."""
