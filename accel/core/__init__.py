"""Events, errors, reasons, settings and files: what every package of the engine uses."""
