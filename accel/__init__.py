"""The engine: torch modules, shapes and numbers. Only `accel.hosts` knows ComfyUI or diffusers."""
