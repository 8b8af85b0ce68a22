"""ComfyUI's model patchers, ControlNets and VAEs with compiled blocks."""
