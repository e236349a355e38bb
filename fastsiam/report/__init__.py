"""What a run tells, as pages and pictures."""
