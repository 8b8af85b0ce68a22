"""What `dev.py` runs beside measurements, and what tests and measurements need of a ComfyUI with this pack."""
