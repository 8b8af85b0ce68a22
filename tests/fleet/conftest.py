"""What tests share is beside their folders."""
