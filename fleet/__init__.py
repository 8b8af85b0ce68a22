"""Ray Serve as a host: one headless ComfyUI in each replica, behind one address with ComfyUI's own API."""
