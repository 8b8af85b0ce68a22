"""What makes generated code for any size as good as that for one size: GPU kernels, and what calls them."""
