"""What makes generated GPU kernels for any size as good as those for one size."""
