"""What every room of the engine uses: events, errors, reasons, settings, files."""
