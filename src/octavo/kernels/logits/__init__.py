"""What is done to logits before the host sees them: soft cap, and the largest one of each row."""
