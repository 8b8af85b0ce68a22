"""What decides which steps are full, beside the schedules of `refresh.py`: the quality target, and what both go by."""
