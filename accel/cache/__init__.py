"""The shared in-memory cache of compiled graphs and captured calls."""
