"""What happened in a run, why, and what to change."""
